"""What tests of foreign launchers start: a config and an environment."""

from __future__ import annotations

from tests.support.world import ROOT

CONFIG = f"""
task: {{use: {ROOT}/tests/support/tiny.py:Tiny}}
device: cpu
batch: {{total: 8}}
train: {{steps: 12, optimizer: {{name: sgd, lr: 0.01}}}}
log: {{every: 5}}
"""
