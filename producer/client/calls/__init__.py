"""The client's calls beside single jobs: runs of many jobs, and reports for gateways and commands."""
