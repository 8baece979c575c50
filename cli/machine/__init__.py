"""What this machine has: `penstock doctor`, `penstock plan`, and the GPUs and CPUs that replicas of a node get."""
