"""The system calls that a sandboxed program may not make, as a filter that the kernel runs.

A program gets one process: it may start threads, never another process, so the limit on its
address space is a limit on all of its memory. What would lend it memory outside that address space
(System V and POSIX IPC, memfd, inotify), a second set of rights (namespaces, mounts, key rings) or
a wide door into the kernel (bpf, io_uring, userfaultfd, sockets other than Unix ones) is refused.
Refused calls fail with an error, as on a kernel without them.

The filter is classic BPF over ``struct seccomp_data`` (Linux, Documentation/userspace-api/
seccomp_filter.rst), assembled by hand because libseccomp is not everywhere.
"""

import errno
import functools
import platform
import socket
import struct

# Audit architecture, and the column of the table below that holds its call numbers.
_MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
# Call -> its number on x86_64 and on aarch64; None where the machine has no such call.
_REFUSED: dict[str, tuple[int | None, int | None]] = {
    # memory and messages outside the address space
    "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195), "shmdt": (67, 197),
    "semget": (64, 190), "semop": (65, 193), "semtimedop": (220, 192), "semctl": (66, 191),
    "msgget": (68, 186), "msgsnd": (69, 189), "msgrcv": (70, 188), "msgctl": (71, 187),
    "mq_open": (240, 180), "mq_unlink": (241, 181), "mq_timedsend": (242, 182),
    "mq_timedreceive": (243, 183), "mq_notify": (244, 184), "mq_getsetattr": (245, 185),
    "memfd_create": (319, 279), "inotify_init": (253, None), "inotify_init1": (294, 26),
    "fanotify_init": (300, 262), "fanotify_mark": (301, 263), "io_setup": (206, 0),
    "io_submit": (209, 2), "io_pgetevents": (333, 292), "vmsplice": (278, 75),
    # key rings
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    # namespaces, mounts and other roots
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39),
    "pivot_root": (155, 41), "chroot": (161, 51), "mknod": (133, None), "mknodat": (259, 33),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
    # other processes, and doors into the kernel
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "kcmp": (312, 272), "userfaultfd": (323, 282), "bpf": (321, 280),
    "perf_event_open": (298, 241), "seccomp": (317, 277), "personality": (135, 92),
    "modify_ldt": (154, None), "iopl": (172, None), "ioperm": (173, None), "uselib": (134, None),
    "remap_file_pages": (216, 234), "move_pages": (279, 239), "migrate_pages": (256, 238),
    "mbind": (237, 235), "set_mempolicy": (238, 237), "get_mempolicy": (239, 236),
    # administration of the machine
    "quotactl": (179, 60), "acct": (163, 89), "swapon": (167, 224), "swapoff": (168, 225),
    "reboot": (169, 142), "sethostname": (170, 161), "setdomainname": (171, 162),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "init_module": (175, 105),
    "finit_module": (313, 273), "delete_module": (176, 106), "settimeofday": (164, 170),
    "clock_settime": (227, 112), "adjtimex": (159, 171), "clock_adjtime": (305, 266),
    "syslog": (103, 116), "vhangup": (153, 58), "lookup_dcookie": (212, 18),
    "nfsservctl": (180, 42), "sysfs": (139, None), "ustat": (136, None), "_sysctl": (156, None),
}  # fmt: skip
_FORKS = {"fork": (57, None), "vfork": (58, None)}
_CLONE = (56, 220)
_SOCKETS = {"socket": (41, 198), "socketpair": (53, 199)}
# From here on all machines have the same numbers. Calls newer than these are unknown to this filter
# (io_uring, clone3, new mounts, ...): they do not exist, but for these.
_NEW = 424
_NEW_ALLOWED = {
    "close_range": 436, "openat2": 437, "faccessat2": 439, "epoll_pwait2": 441, "futex_waitv": 449,
}  # fmt: skip
_X32 = 0x4000_0000
# linux/sched.h: CLONE_THREAD, and every CLONE_NEW* that clone takes.
_CLONE_THREAD = 0x0001_0000
_CLONE_NEW = 0x0002_0000 | 0x0200_0000 | 0x0400_0000 | 0x0800_0000 | 0x1000_0000 \
    | 0x2000_0000 | 0x4000_0000  # fmt: skip

# linux/bpf_common.h: load a word, jumps, return; linux/seccomp.h: what is returned.
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_KILL, _ALLOW, _ERRNO = 0x8000_0000, 0x7FFF_0000, 0x0005_0000
_NUMBER, _MACHINE, _FIRST_ARGUMENT = 0, 4, 16
_DENY = _ERRNO | errno.EPERM
_ABSENT = _ERRNO | errno.ENOSYS


def supported() -> bool:
    """Return whether there is a filter for this machine's processor."""
    return platform.machine() in _MACHINES


@functools.cache
def program(forks: bool) -> bytes:
    """Return the filter for this machine, as an array of ``struct sock_filter``.

    Args:
        forks: allow new processes (never new namespaces); threads are allowed in any case.
    """
    audit, column = _MACHINES[platform.machine()]
    # A jump is (code, lines to skip if true, lines to skip if false, value). First the processor,
    # because call numbers differ between processors, then the call's number.
    code = [
        (_LOAD, 0, 0, _MACHINE), (_EQUAL, 1, 0, audit), (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER), (_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, _DENY),
    ]  # fmt: skip

    def answer(call: int | None, value: int) -> None:
        if call is not None:
            code.extend([(_EQUAL, 0, 1, call), (_RETURN, 0, 0, value)])

    for call in _NEW_ALLOWED.values():
        answer(call, _ALLOW)
    code.extend([(_AT_LEAST, 0, 1, _NEW), (_RETURN, 0, 0, _ABSENT)])
    for numbers in (_REFUSED if forks else _REFUSED | _FORKS).values():
        answer(numbers[column], _DENY)
    for numbers in _SOCKETS.values():
        code.extend([
            (_EQUAL, 0, 4, numbers[column]), (_LOAD, 0, 0, _FIRST_ARGUMENT),
            (_EQUAL, 0, 1, socket.AF_UNIX), (_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _DENY),
        ])  # fmt: skip
    # clone makes threads, processes and namespaces; its first argument says which.
    code.extend([
        (_EQUAL, 0, 3 if forks else 5, _CLONE[column]), (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_ANY_BIT, 0, 1, _CLONE_NEW), (_RETURN, 0, 0, _DENY),
    ])  # fmt: skip
    if not forks:
        code.extend([(_ANY_BIT, 1, 0, _CLONE_THREAD), (_RETURN, 0, 0, _DENY)])
    code.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("=HBBI", *line) for line in code)
