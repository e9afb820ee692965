"""Checkpoints of a run in training: when it saves, what a checkpoint holds, and the way back from one."""
