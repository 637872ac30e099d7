"""Engines that run trials: this machine, hosts over ssh, Slurm, Ray, or Kubernetes."""
