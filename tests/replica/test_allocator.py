"""What a worker frees stays with it.

Faults planted by hand, each seen to fail a test: the end of the heap trimmed as before · large blocks mapped anew.
"""

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, resource
from squall.replica.allocator import keep_memory

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes, libc.free.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [libc.malloc(8 << 20) for _ in range(4)]
    for block in blocks:
        libc.memset(block, 1, 8 << 20)
    for block in blocks:
        libc.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

KEEP
faults()
print(faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the allocator of glibc")
def test_the_second_time_memory_is_there_already() -> None:
    pages = 32 << 20 >> 12
    assert _faults("") > pages // 2
    assert _faults("keep_memory()") < pages // 20


def _faults(keep: str) -> int:
    program = PROGRAM.replace("KEEP", keep)
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return int(told.stdout)
