"""The system calls of a sandboxed program, as a filter that libseccomp compiles for bubblewrap.

A program gets one process with threads, so the limit on its address space limits all of its memory.
What would lend it memory elsewhere (shared memory, memfd), other rights (namespaces, mounts, key
rings) or a wide door into the kernel (bpf, sockets other than Unix ones) is refused; calls newer
than Linux 5.1 do not exist, except for a few.
"""

import ctypes
import functools
import os
import socket
from errno import ENOSYS, EPERM

_REFUSED = """
shmget shmat shmctl shmdt semget semop semtimedop semctl msgget msgsnd msgrcv msgctl mq_open
mq_unlink mq_timedsend mq_timedreceive mq_notify mq_getsetattr memfd_create inotify_init
inotify_init1 fanotify_init fanotify_mark io_setup io_submit io_pgetevents vmsplice add_key
request_key keyctl unshare setns mount umount2 pivot_root chroot mknod mknodat name_to_handle_at
open_by_handle_at ptrace process_vm_readv process_vm_writev kcmp userfaultfd bpf perf_event_open
seccomp personality modify_ldt iopl ioperm uselib remap_file_pages move_pages migrate_pages
mbind set_mempolicy get_mempolicy quotactl acct swapon swapoff reboot sethostname setdomainname
kexec_load kexec_file_load init_module finit_module delete_module settimeofday clock_settime
adjtimex clock_adjtime syslog vhangup lookup_dcookie nfsservctl sysfs ustat _sysctl fork vfork
clone socket socketpair
"""
REFUSED = frozenset(_REFUSED.split())
NEW, NEW_ALLOWED = 424, ("close_range", "openat2", "faccessat2", "epoll_pwait2", "futex_waitv")
# linux/sched.h: CLONE_THREAD, and every CLONE_NEW* that clone takes.
THREAD, NAMESPACES = 0x0001_0000, 0x7E02_0000
ALLOW, ERRNO, EQUAL, MASKED = 0x7FFF_0000, 0x0005_0000, 4, 7  # seccomp.h


class _Compare(ctypes.Structure):
    _fields_ = [("argument", ctypes.c_uint), ("how", ctypes.c_int),
                ("a", ctypes.c_uint64), ("b", ctypes.c_uint64)]  # fmt: skip


def filter_descriptor() -> int:
    """A file descriptor of the filter."""
    descriptor = os.memfd_create("filter")
    os.write(descriptor, _program())
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


@functools.cache
def _program() -> bytes:
    library = ctypes.CDLL("libseccomp.so.2")
    library.seccomp_init.restype = ctypes.c_void_p
    library.seccomp_syscall_resolve_num_arch.restype = ctypes.c_char_p
    context = ctypes.c_void_p(library.seccomp_init(ERRNO | ENOSYS))

    def rule(action: int, call: str, *conditions: _Compare) -> None:
        number = library.seccomp_syscall_resolve_name(call.encode())
        array = (_Compare * len(conditions))(*conditions)
        if number >= 0:
            code = library.seccomp_rule_add_array(context, action, number, len(conditions), array)
            assert code == 0, (call, code)

    native = library.seccomp_arch_native()
    names = (library.seccomp_syscall_resolve_num_arch(native, n) for n in range(NEW))
    for call in {name.decode() for name in names if name} | set(NEW_ALLOWED):
        if call not in REFUSED:
            rule(ALLOW, call)
        elif call in ("socket", "socketpair"):
            rule(ALLOW, call, _Compare(0, EQUAL, socket.AF_UNIX))
        elif call == "clone":  # threads, no processes and no namespaces
            rule(ALLOW, call, _Compare(0, MASKED, THREAD | NAMESPACES, THREAD))
            rule(ERRNO | EPERM, call, _Compare(0, MASKED, THREAD, 0))
        else:
            rule(ERRNO | EPERM, call)
    with os.fdopen(os.memfd_create("filter"), "rb") as file:
        library.seccomp_export_bpf(context, file.fileno())
        library.seccomp_release(context)
        file.seek(0)
        return file.read()
