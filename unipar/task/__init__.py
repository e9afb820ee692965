"""The user's side: `Task`, what a training loop may do with a run, and how other processes find the task's code."""

from unipar.task.run import Run as Run
from unipar.task.run import Share as Share
from unipar.task.task import Task as Task
