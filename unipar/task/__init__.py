"""The user's side: `Task`, `Run`, and how other processes find and import the task's code."""

from unipar.task.run import Run as Run
from unipar.task.run import Share as Share
from unipar.task.task import Task as Task
