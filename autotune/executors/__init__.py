"""Engines that run trials: this machine, hosts over ssh, Slurm, Ray, or a table of earlier measurements."""
