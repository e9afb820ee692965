"""Activation of the emulated device in each Python that starts with this folder on its path."""

import os

if os.environ.get("DEVICE_LINES"):
    from tests.support.softcuda.coverage import recorder

    recorder.install()

if os.environ.get("SOFTCUDA"):
    from tests.support.softcuda import activation

    activation.install()
