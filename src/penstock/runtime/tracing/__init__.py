"""OpenTelemetry traces, off by default: what a job carries of its trace, and the export of a process's spans."""
