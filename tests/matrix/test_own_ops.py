"""The matrix of `twinop test`, for twinop's own ops and the two test ops."""

from twinop.testing.matrix.test_cuda import *  # noqa: F403
from twinop.testing.matrix.test_errors import *  # noqa: F403
from twinop.testing.matrix.test_exports import *  # noqa: F403
from twinop.testing.matrix.test_gradients import *  # noqa: F403
from twinop.testing.matrix.test_results import *  # noqa: F403
