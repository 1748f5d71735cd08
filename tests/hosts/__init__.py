"""Jobs on several hosts: pretended ones, network namespaces, ssh, Slurm and Ray."""
