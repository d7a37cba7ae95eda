"""Writes the boards' JSON, to be imported into Grafana. A test holds it equal to the code."""

import json
from pathlib import Path

from grafana_foundation_sdk.builders.dashboard import Dashboard
from grafana_foundation_sdk.cog.encoder import JSONEncoder

from dashboards import fleet, node, team_and_pod

FOLDER = Path(__file__).parent / "json"
BOARDS = {"fgpu-node": node.build, "fgpu-pod": team_and_pod.build, "fgpu-fleet": fleet.build}


def render(board: Dashboard) -> str:
    """Answer a board as JSON, its panels numbered in their order."""
    built = board.build()
    for number, panel in enumerate(built.panels or [], start=1):
        panel.id_val = number
    return json.dumps(built, cls=JSONEncoder, indent=2, sort_keys=True) + "\n"


def main() -> None:
    """Write every board."""
    FOLDER.mkdir(exist_ok=True)
    for name, build in BOARDS.items():
        (FOLDER / f"{name}.json").write_text(render(build()))


if __name__ == "__main__":
    main()
