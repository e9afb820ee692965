"""`Task`, `Run`, and how other processes find and import the code of a task: the user's side."""

from unipar.task.run import LocalBatch as LocalBatch
from unipar.task.run import Run as Run
from unipar.task.task import Task as Task
