"""Job systems that start a run on several machines: Slurm, Kubernetes, Ray, mpirun."""
