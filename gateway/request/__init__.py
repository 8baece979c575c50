"""Requests on their way in: from the bytes of a body to checked parameters, and to submitted jobs."""
