#!/usr/bin/env python3
"""Follows docs/guide/first-op.md with an installed wheel, and writes how long each step took as JSON.

    python3 tests/first_op_report.py --wheel dist/twinop-0.2.0-*.whl --output bench/results

It makes a virtual environment in an empty folder, whose path has a space and a letter outside ASCII, and types
what the page says there; then `twinop bench`, and `twinop serve` until the model is ready. With --here it uses
this Python and what is installed for it. This script itself needs the standard library only.
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


def follow(folder: Path, env: dict[str, str], bench: list[str]) -> tuple[dict[str, float], dict[str, int]]:
    """Types the page. Returns the seconds of each command, and the lines of each file that the reader writes."""
    seconds: dict[str, float] = {}
    lines: dict[str, int] = {}

    def timed(name: str, run: object) -> None:
        start = time.perf_counter()
        run()  # type: ignore[operator]
        seconds[name] = round(seconds.get(name, 0) + time.perf_counter() - start, 2)
        print(f"{seconds[name]:8.2f} s  {name}", flush=True)

    for part in PART.finditer(PAGE.read_text()):
        text = part["text"]
        if part["file"]:
            (folder / part["file"]).write_text(text)
            lines[part["file"]] = sum(1 for line in text.splitlines() if line.strip())
        elif part["language"] == "python":
            command = [sys.executable if env.get("HERE") else "python", "-c", text]
            timed("the same in plain ONNX Runtime", lambda: check(command, folder / "mish", env))
        else:
            where = folder
            for line in text.splitlines():
                if line.startswith("cd "):
                    where = where / line[3:]
                else:
                    timed(line, lambda: check(["bash", "-c", line], where, env))
    timed(" ".join(bench), lambda: check(bench, folder / "mish", env))
    timed("twinop build, a second time", lambda: check(["twinop", "build"], folder / "mish", env))
    timed("twinop serve net.onnx, until ready", lambda: serve(env, folder / "mish"))
    return seconds, lines


def check(command: list[str], folder: Path, env: dict[str, str]) -> None:
    done = subprocess.run(
        command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with code {done.returncode}:\n{done.stdout[-6000:]}")


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
        seconds = {}
        if not options.here:
            subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
            pip = [str(folder / "venv/bin/pip"), "install", "--quiet", *INSTALL]
            subprocess.run([*pip, f"{options.wheel.resolve()}[serve,test,bench]", "hatchling"], check=True)
            env["PATH"] = f"{folder}/venv/bin:{env['PATH']}"
            seconds["pip install"] = round(time.perf_counter() - start, 2)
        steps, lines = follow(folder, env, options.bench.split())
        results = folder / "mish/bench-results"
        options.output.mkdir(parents=True, exist_ok=True)
        for path in results.glob("*.json") if results.is_dir() else ():
            shutil.copy(path, options.output / f"first-op-bench-{options.name}.json")
        facts = {
            "benchmark": "first-op",
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "commit": options.commit,
            "python": platform.python_version(),
            "cpu_cores": os.cpu_count(),
            "seconds": seconds | steps,
            "seconds_in_all": round(time.perf_counter() - start, 2),
            "lines": lines,
        }
    path = options.output / f"first-op-{options.name}.json"
    path.write_text(json.dumps(facts, indent=1, ensure_ascii=False) + "\n")
    print(f"{facts['seconds_in_all']:8.2f} s  in all; {sum(lines.values())} lines; wrote {path}")


if __name__ == "__main__":
    main()
