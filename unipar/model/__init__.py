"""Preparation of the model for an engine: creation, blocks, transforms, pre-trained weights, optimizer groups.

It works on what the task's methods returned, and does not import `unipar.task`.
"""
