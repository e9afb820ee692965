"""Recording of device lines in each Python that starts with this folder on its path and without an emulated device."""

from tests.support.softcuda.coverage import recorder

recorder.install()
