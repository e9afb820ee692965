"""Start of an observed process: waits for `import torch`, installs the observer, and runs the other sitecustomize.

`unipar observe` puts this folder first in PYTHONPATH, so that every Python of the command imports this file. It imports
nothing of unipar before torch is imported, and never raises.
"""

import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))


class _AfterTorch:
    """Finder of `torch` alone, which installs the observer when torch is imported, not when somebody looks for it."""

    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name != "torch":
            return None
        others = (finder for finder in list(sys.meta_path) if finder is not self)
        spec = next((found for finder in others if (found := finder.find_spec(name, path, target)) is not None), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_install(module):  # type: ignore[no-untyped-def]
            sys.meta_path.remove(self)
            execute(module)
            _install()

        spec.loader.exec_module = execute_and_install
        return spec


def _install():  # type: ignore[no-untyped-def]
    try:
        from unipar.observing.process.start import install
    except ImportError as e:
        sys.stderr.write(
            f"unipar observe: {sys.executable} cannot import unipar ({e}), so its processes are not observed; "
            "install unipar there\n"
        )
        return
    install()


def _run_hidden_file():  # type: ignore[no-untyped-def]
    """Run the sitecustomize that this file hides, if there is one."""
    for folder in sys.path:
        path = os.path.abspath(folder or ".")
        file = os.path.join(path, "sitecustomize.py")
        if path != _HERE and os.path.isfile(file):
            with open(file, encoding="utf-8") as text:
                code = compile(text.read(), file, "exec")
            exec(code, {"__name__": "sitecustomize", "__file__": file})
            return


if os.environ.get("UNIPAR_OBSERVE"):
    sys.meta_path.insert(0, _AfterTorch())
_run_hidden_file()
