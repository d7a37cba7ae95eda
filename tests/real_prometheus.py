"""A Prometheus of the test's own, and how what an exporter said becomes its past."""

import contextlib
import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import defaultdict
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families


def skip_without_prometheus():
    if missing := [program for program in ("prometheus", "promtool") if shutil.which(program) is None]:
        pytest.skip(f"{' and '.join(missing)} not installed (Debian package prometheus)")


class Prometheus:
    """A Prometheus of its own in a folder; answers queries."""

    def __init__(self, folder, config):
        with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as free:
            self.port = free.getsockname()[1]
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
        self.log = (folder / "log").open("w")
        self.process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={folder / 'prometheus.yaml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                "--storage.tsdb.retention.time=100y",
                f"--web.listen-address=127.0.0.1:{self.port}",
            ],
            stdout=self.log,
            stderr=subprocess.STDOUT,
        )

    def wait_until_ready(self):
        deadline = time.monotonic() + 30
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/-/ready", timeout=5).close()
            except (urllib.error.URLError, ConnectionError):
                if time.monotonic() > deadline or self.process.poll() is not None:
                    pytest.fail("Prometheus did not start: " + Path(self.log.name).read_text()[-2000:])
                time.sleep(0.1)
            else:
                return self

    def get(self, path, **parameters):
        query = urllib.parse.urlencode(parameters)
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}?{query}", timeout=20) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            pytest.fail(f"{parameters}: {json.load(error)['error']}")

    def query(self, expr, seconds=None):
        """Answer the labels of each series and its value."""
        at = {} if seconds is None else {"time": seconds}
        return [(row["metric"], float(row["value"][1])) for row in self.get("/api/v1/query", query=expr, **at)["result"]]

    def stop(self):
        self.process.terminate()
        self.process.wait(timeout=20)
        self.log.close()


def backfill(said, folder):
    """Make blocks of what was said, (seconds, the scrape target's labels, exposition) each, that a Prometheus in this folder will hold."""
    write_openmetrics(said, folder / "said.txt")
    made = subprocess.run(
        ["promtool", "tsdb", "create-blocks-from", "openmetrics", folder / "said.txt", folder / "data"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert made.returncode == 0, made.stdout + made.stderr


def write_openmetrics(said, path):
    """Write the samples as scrapes of their targets would have left them, a family at a time as the format wants it."""
    lines = defaultdict(list)
    for seconds, target, text in said:
        lines["up"].append(f"up{labels_of(target)} 1 {seconds}")
        for family in text_string_to_metric_families(text):
            lines[family.name] += [
                f"{sample.name}{labels_of({**target, **sample.labels})} {sample.value} {seconds}" for sample in family.samples
            ]
    path.write_text("\n".join(line for family in lines.values() for line in family) + "\n# EOF\n")


def labels_of(labels):
    return "{" + ",".join(f"{name}={json.dumps(value)}" for name, value in labels.items()) + "}"
