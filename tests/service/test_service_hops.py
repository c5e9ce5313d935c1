"""How many functions of ours are between a request's socket and ONNX Runtime's run."""

from pathlib import Path

import service_models as models
from service_fixtures import serve
from service_rows import QUICK, ROW, scaled

import twinop

# A short run is on the event loop's thread, below the whole way of its request.
PROGRAM = """
import json, sys, traceback
from twinop.cli import app
from twinop.deploy.service import instance, limits
from twinop.deploy.inference_session import Session

class Noting:
    def __init__(self, session):
        self.inner = session._inner

    def run(self, *arguments):
        frames = [[each.filename, each.name] for each in traceback.extract_stack()[:-1]]
        print(json.dumps({"message": "run", "frames": frames}), file=sys.stderr, flush=True)
        return self.inner.run(*arguments)

def made(self, session):
    original(self, session)
    session._inner = Noting(session)

original, instance.Instance.__init__ = instance.Instance.__init__, made
limits.SHORT_SECONDS = 1.0
app(sys.argv[1:])
"""


def test_hops_from_the_socket_to_the_run(tmp_path: Path) -> None:
    models.place(tmp_path, "m", scaled(1))
    with serve(tmp_path, *QUICK, program=("-c", PROGRAM)) as served:
        for _ in range(3):
            assert served.infer("m", ROW).status == 200
        frames = [line["frames"] for line in served.log if line["message"] == "run"][-1]
    ours = str(Path(twinop.__file__).parent)
    names = [f"{Path(file).stem}.{name}" for file, name in frames if file.startswith(ours)]
    way = names[names.index("rest.__call__") :]
    assert way[-1] == "tensor_specs.guarded" and len(way) <= 10, way
