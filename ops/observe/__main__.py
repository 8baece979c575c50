"""Write the dashboards: `PYTHONPATH=ops .venv/bin/python -m observe`."""

from __future__ import annotations

from observe.grafana import BOARDS, FOLDER, json_of


def main() -> None:
    """Write one file for each dashboard."""
    for board in BOARDS:
        path = FOLDER / f"{board.name}.json"
        path.write_text(json_of(board))
        print(path)


if __name__ == "__main__":
    main()
