"""The web page: a playground and a dashboard. `static/` has the files that browsers load; they need no build step.

The page uses the same HTTP API as any other client, and `GET /dashboard` for the dashboard.
"""
