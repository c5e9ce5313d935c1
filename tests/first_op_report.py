#!/usr/bin/env python3
"""Follows docs/guide/first-op.md with an installed wheel, and writes how long each step took as JSON.

    python3 tests/first_op_report.py --wheel dist/twinop-0.2.0-*.whl --output tests/results

It makes a virtual environment in an empty folder, whose path has a space and a letter beyond ASCII, and types
there what the page says. Then come `twinop bench`, and `twinop serve` until the model is ready. With --here
it uses this Python and what is installed for it. This script needs the standard library only.
"""

import argparse
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/guide/first-op.md"
PART = re.compile(
    r"(?:^`(?P<file>[\w/.-]+)`:\n\n)?^```(?P<language>\w+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)
INSTALL = ("torch==2.13.0", "onnxruntime==1.31.1")


def serve(env: dict[str, str], folder: Path) -> None:
    """Serves net.onnx, and returns when the model is ready.

    Raises:
        RuntimeError: the server ended.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = ["twinop", "serve", "net.onnx", "--no-grpc", "--http-port", str(port)]
    running = subprocess.Popen(command, cwd=folder, env=env)
    try:
        while running.poll() is None:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/models/net/ready", timeout=5):
                    return
            except OSError:
                time.sleep(0.02)
        raise RuntimeError(f"{' '.join(command)} ended with code {running.returncode}")
    finally:
        running.terminate()
        running.wait()


class Steps:
    """Runs commands, and keeps the seconds of each."""

    def __init__(self, env: dict[str, str]) -> None:
        self.env = env
        self.seconds: dict[str, float] = {}

    def add(self, name: str, start: float) -> None:
        self.seconds[name] = round(self.seconds.get(name, 0) + time.perf_counter() - start, 2)
        print(f"{self.seconds[name]:8.2f} s  {name}", flush=True)

    def run(self, name: str, command: list[str], folder: Path) -> None:
        """Runs a command. Ends the program with the command's output if it fails."""
        start = time.perf_counter()
        done = subprocess.run(
            command, cwd=folder, env=self.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        if done.returncode:
            sys.exit(f"{' '.join(command)} ended with code {done.returncode}:\n{done.stdout[-6000:]}")
        self.add(name, start)


def follow(folder: Path, steps: Steps, bench: str) -> dict[str, int]:
    """Types the page. Returns the lines of each file that the reader writes."""
    lines: dict[str, int] = {}
    for part in PART.finditer(PAGE.read_text()):
        text = part["text"]
        if part["file"]:
            (folder / part["file"]).write_text(text)
            lines[part["file"]] = sum(1 for line in text.splitlines() if line.strip())
        elif part["language"] == "python":
            steps.run("the same in plain ONNX Runtime", ["python", "-c", text], folder / "mish")
        else:
            where = folder
            for line in text.splitlines():
                if line.startswith("cd "):
                    where = where / line[3:]
                else:
                    steps.run(line, ["bash", "-c", line], where)
    project = folder / "mish"
    steps.run(bench, bench.split(), project)
    steps.run("twinop build, a second time", ["twinop", "build"], project)
    start = time.perf_counter()
    serve(steps.env, project)
    steps.add("twinop serve net.onnx, until ready", start)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--wheel", type=Path, help="twinop's wheel, for a new virtual environment")
    parser.add_argument("--here", action="store_true", help="use what is installed for this Python")
    parser.add_argument("--output", type=Path, required=True, help="the folder of the JSON file")
    parser.add_argument("--name", default=platform.node(), help="the machine, in the file's name")
    parser.add_argument("--commit", default="")
    parser.add_argument("--bench", default="twinop bench --quick", help="the command that measures")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work) / "an empty folder ä"
        folder.mkdir()
        env = {**os.environ, "HOME": work, "LANG": "C.UTF-8", "COLUMNS": "100"}
        start = time.perf_counter()
        steps = Steps(env)
        if not options.here:
            subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
            pip = [str(folder / "venv/bin/pip"), "install", "--quiet", *INSTALL]
            subprocess.run([*pip, f"{options.wheel.resolve()}[serve,test,bench]", "hatchling"], check=True)
            env["PATH"] = f"{folder}/venv/bin:{env['PATH']}"
            steps.add("pip install", start)
        lines = follow(folder, steps, options.bench)
        results = folder / "mish/bench-results"
        options.output.mkdir(parents=True, exist_ok=True)
        for path in results.glob("*.jsonl") if results.is_dir() else ():
            shutil.copy(path, options.output / f"first-op-bench-{options.name}.jsonl")
        facts = {
            "benchmark": "first-op",
            "environment": {
                "date": time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime()),
                "commit": options.commit,
                "python": platform.python_version(),
                "cpu_cores": os.cpu_count(),
            },
            "seconds": steps.seconds,
            "seconds_in_all": round(time.perf_counter() - start, 2),
            "lines": lines,
        }
    path = options.output / f"first-op-{options.name}.json"
    path.write_text(json.dumps(facts, indent=1, ensure_ascii=False) + "\n")
    print(f"{facts['seconds_in_all']:8.2f} s  in all; {sum(lines.values())} lines; wrote {path}")


if __name__ == "__main__":
    main()
