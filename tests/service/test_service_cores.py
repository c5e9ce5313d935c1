"""The quota of cores in the files of control groups, versions 1 and 2."""

from pathlib import Path

import pytest

from twinop.deploy.service import cores

LIMITS: dict[str, tuple[dict[str, str], str, int | None]] = {
    "none": ({}, "0::/\n", None),
    "v2": ({"cpu.max": "150000 100000"}, "0::/\n", 2),
    "v2, less than a core": ({"cpu.max": "50000 100000"}, "0::/\n", 1),
    "v2, without a limit": ({"cpu.max": "max 100000"}, "0::/\n", None),
    "v2, more than there are": ({"cpu.max": "900000 100000"}, "0::/\n", None),
    "v2, a group above": (
        {"pods/a/cpu.max": "max 100000", "pods/cpu.max": "300000 100000"},
        "0::/pods/a\n",
        3,
    ),
    "v1": (
        {"cpu/a/cpu.cfs_quota_us": "200000", "cpu/a/cpu.cfs_period_us": "100000"},
        "5:memory:/a\n4:cpu,cpuacct:/a\n",
        2,
    ),
    "v1, without a limit": (
        {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"},
        "4:cpu,cpuacct:/\n",
        None,
    ),
}


@pytest.mark.parametrize("name", LIMITS)
def test_the_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    files, own, expected = LIMITS[name]
    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda pid: set(range(8)))
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(f"{text}\n")
    (tmp_path / "own").write_text(own)
    assert cores.quota(tmp_path, tmp_path / "own") == expected
