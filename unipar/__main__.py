"""`python -m unipar`, which is how launchers start it: `torchrun -m unipar run x.yaml`."""

from unipar.cli.app import main

if __name__ == "__main__":
    main()
