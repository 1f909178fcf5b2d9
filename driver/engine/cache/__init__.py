"""The device's side of compilation caching: it knows what it wrote, and believes nothing else."""
