"""What every process agrees on: jobs, chunks, errors, keys, wire format, scripts, admission.

Imports no torch, no HTTP framework and no other room of the house.
"""
