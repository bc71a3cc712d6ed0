"""Stops the main thread of a process while it is outside of system calls, and none of its other threads.

The process goes on when this one ends.
"""
import ctypes, os, sys, time
libc = ctypes.CDLL(None, use_errno=True)
process, all = int(sys.argv[1]), 0x40000000

def ptrace(request):
    if libc.ptrace(request, process, 0, 0) != 0:
        sys.exit(os.strerror(ctypes.get_errno()))

ptrace(0x4206)  # PTRACE_SEIZE
while True:
    ptrace(0x4207)  # PTRACE_INTERRUPT
    os.waitpid(process, all)
    with open(f'/proc/{process}/syscall') as call:
        if call.read().startswith('-1 '):
            break
    ptrace(7)  # PTRACE_CONT
    time.sleep(0.003)
print('stopped', flush=True)
os.waitpid(process, all)
