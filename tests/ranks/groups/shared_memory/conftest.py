"""Groups over shared memory whose ranks are threads of the test, and the parts they are made of."""

from helpers.segments import pair as pair
from helpers.shared_memory_groups import everywhere as everywhere
from helpers.shared_memory_groups import world as world
from helpers.wait_queues import make as make
from helpers.wait_queues import memory as memory
