"""A rank that waits for its own threads: a hang report shows where its main thread is, whatever other threads exist."""

from __future__ import annotations

import json

from gradwire.observe.hangs.hang_watch import HangWatch
from gradwire.observe.rings.run_follower import RunFollower
from helpers.waiting import wait_until

SCRIPT = """
import concurrent.futures, http.server, multiprocessing.pool, queue, sys, threading, time
import torch
from gradwire import observe
from gradwire.collectives import all_reduce
from gradwire.groups.ledger import Ledger
from gradwire.groups.work import Work

directory, rank, size, what = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]

def never():
    threading.Event().wait()

def start(target):
    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    return thread

def heartbeat():
    while True:
        time.sleep(60)

server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
start(server.serve_forever)
pool = concurrent.futures.ThreadPoolExecutor(2)
pool.submit(int).result()
start(heartbeat)
lock, held = threading.Lock(), threading.RLock()
lock.acquire()
ready = threading.Event()
start(lambda: (held.acquire(), ready.set(), never()))
ready.wait()
condition = threading.Condition()

def waits_in_lock(): lock.acquire()
def waits_in_held_lock():
    with held: pass
def waits_in_queue(): queue.Queue().get()
def waits_in_simple_queue(): queue.SimpleQueue().get()
def waits_in_future(): pool.submit(never).result()
def waits_in_futures(): concurrent.futures.wait([pool.submit(never)])
def waits_in_join(): start(never).join()
def waits_in_event(): threading.Event().wait()
def waits_in_condition():
    with condition: condition.wait()
def waits_in_semaphore(): threading.Semaphore(0).acquire()
def waits_in_barrier(): threading.Barrier(2).wait()
def waits_in_pool(): multiprocessing.pool.ThreadPool(1).map(lambda _: never(), [0])

if what == "names":
    print(" ".join(name for name in dir() if name.startswith("waits_in_")), flush=True)
    sys.exit()
observe.start(directory, rank=rank, size=size)
ledger = Ledger(name="world", rank=rank, size=size)
def submit():
    work = Work(all_reduce(torch.ones(3)), ledger, seq=ledger.next_seq(), timeout=100)
    ledger.submitted(work)
    return work
submit().finish()
if what == "waits":
    ledger.waited(submit())
    print("ready", flush=True)
    sys.stdin.readline()
else:
    print("ready", flush=True)
    globals()[what]()
"""


def test_the_place_is_where_the_main_thread_is(tmp_path, warm_python):
    """Lock, queue, future, join, ...: all at once, each in a rank of its own, next to a server, a pool and a heartbeat."""
    script = str(tmp_path / "train.py")
    listing = warm_python.run_all([(SCRIPT, "", "0", "1", "names")], timeout=120, path=script)[0]
    names = listing.stdout.split()
    assert len(names) == 12, listing
    started = [
        warm_python.talk(SCRIPT, str(tmp_path / "run"), str(rank), "13", what, path=script)
        for rank, what in enumerate(["waits", *names])
    ]
    watch = HangWatch(RunFollower(tmp_path / "run"), deadline=0.0)
    try:
        for process in started:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        lines = []
        wait_until(lambda: lines.extend(watch.check()) or lines, "a hang is reported")
    finally:
        watch.run.close()
        for process in started:
            process.kill()
            process.communicate()
    suspects = json.loads((tmp_path / "run" / "hang-1.json").read_text())["suspects"]
    places = {names[one["rank"] - 1]: one["where"] for one in suspects}
    wrong = {
        name: places.get(name) for name in names if not (places.get(name) or "").startswith(f"{name}() at {script}:")
    }
    assert not wrong, (wrong, lines)
    of_join = next(one for one in suspects if names[one["rank"] - 1] == "waits_in_join")
    assert any(place.startswith("heartbeat() at ") for place in of_join["others"]), of_join
