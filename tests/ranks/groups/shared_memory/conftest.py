"""Groups over shared memory whose ranks are threads of the test."""

from helpers.shared_memory_groups import everywhere as everywhere
from helpers.shared_memory_groups import world as world
