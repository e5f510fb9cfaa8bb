"""Groups over shared memory whose ranks are threads of the test, and the parts they are made of."""

from helpers.segments import pair as pair
from helpers.shared_memory_groups import everywhere as everywhere, world as world
from helpers.wait_queues import make as make, memory as memory
