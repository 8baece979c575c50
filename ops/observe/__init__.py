"""What watches penstock: Grafana dashboards, alert rules for Prometheus, and a scrape configuration.

`PYTHONPATH=ops .venv/bin/python -m observe` writes `dashboards/*.json` from `system_boards.py` and `work_boards.py`.
README.md in this folder says how to use them. Nothing here is imported by penstock.
"""
