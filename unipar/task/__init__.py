"""The user's side: `Task`, `Run` (what a training loop may use), and how other processes load the task's code."""

from unipar.task.run import Run as Run
from unipar.task.run import Share as Share
from unipar.task.task import Task as Task
