"""Where things lie: the data folder, and the place of the embedded servers' files.

PostgreSQL refuses to run as root, so under root both embedded servers run as `nobody`, and their files must lie where
that user can reach them. A clone below a 0700 folder (say, root's home) is out of its reach: then the servers' files go
to /var/lib/fanlight/, and nothing that exists is given other permissions. The choice is made once and kept in
servers.json, so that a later chmod cannot make a database disappear.
"""

from __future__ import annotations

import hashlib
import json
import os
import pwd
import stat
import tempfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

UNPRIVILEGED = "nobody"
_SOCKET_PATH_LIMIT = 100  # a Unix socket's address holds 107 bytes


@dataclass(frozen=True)
class Layout:
    """The paths of one installation. Reading them makes nothing; `create()` makes what is missing."""

    data: Path

    @property
    def secret_file(self) -> Path:
        return self.data / "secret.key"

    @property
    def credentials_file(self) -> Path:
        return self.data / "first-credentials.json"

    @property
    def journal(self) -> Path:
        return self.data / "journal"

    @property
    def models(self) -> Path:
        return self.data / "models"

    @property
    def logs(self) -> Path:
        return self.data / "logs"

    @property
    def backups(self) -> Path:
        return self.data / "backups"

    @property
    def run(self) -> Path:
        """Locks, the supervisor's state, snapshots. Not sockets: see `sockets`."""
        return self.data / "run"

    @property
    def servers_file(self) -> Path:
        """Where `servers` was decided; its presence says that this data folder has been in use."""
        return self.data / "servers.json"

    @property
    def state_file(self) -> Path:
        return self.run / "processes.json"

    @property
    def guardian_file(self) -> Path:
        """Names the supervisor's process; shims end their worker once that is gone for good."""
        return self.run / "guardian.json"

    @property
    def receiver_file(self) -> Path:
        """Where engines' spans are taken, with the token for it."""
        return self.run / "receiver.json"

    @property
    def workers(self) -> Path:
        return self.data / "workers"

    @cached_property
    def servers(self) -> Path:
        """Folder of the embedded servers: reachable by the user they run as."""
        recorded = self.servers_file
        if recorded.exists():
            return Path(json.loads(recorded.read_text())["servers"])
        if os.geteuid() != 0 or reachable(self.data.parent, server_user()):
            return self.data / "servers"
        return Path("/var/lib/fanlight") / _short_hash(self.data)

    @property
    def postgres_data(self) -> Path:
        return self.servers / "postgres"

    @property
    def valkey_data(self) -> Path:
        return self.servers / "valkey"

    @cached_property
    def sockets(self) -> Path:
        """0700 folder of the servers' sockets, short enough for a socket address."""
        return _short_folder(self.servers / "run", "s")

    @cached_property
    def worker_sockets(self) -> Path:
        """0700 folder of the workers' sockets; ours alone."""
        return _short_folder(self.data / "run" / "w", "w")

    @property
    def valkey_socket(self) -> Path:
        return self.sockets / "valkey.sock"

    def create(self) -> None:
        """Make every folder that is missing, with its owner and mode. Existing parents are left as they are."""
        as_root = os.geteuid() == 0
        self.data.mkdir(parents=True, exist_ok=True)
        # Root's servers run as another user, who must pass through but not look around.
        self.data.chmod(0o711 if as_root else 0o700)
        for folder in (
            self.journal,
            self.models,
            self.logs,
            self.backups,
            self.run,
            self.workers,
            self.worker_sockets,
        ):
            folder.mkdir(exist_ok=True, parents=True)
            if folder == self.worker_sockets:
                _check_owner(folder, os.geteuid())
            folder.chmod(0o700)
        self.servers.mkdir(parents=True, exist_ok=True)
        self.servers.chmod(0o711 if as_root else 0o700)
        for folder in (self.valkey_data, self.sockets):
            folder.mkdir(exist_ok=True)
            user = server_user()
            if folder == self.sockets:
                _check_owner(folder, os.geteuid(), user.pw_uid)
            if as_root:
                os.chown(folder, user.pw_uid, user.pw_gid)
            folder.chmod(0o700)
        recorded = self.servers_file
        if not recorded.exists():
            write_atomically(recorded, json.dumps({"servers": str(self.servers)}))


def server_user() -> pwd.struct_passwd:
    """The account the embedded servers run as: ours, or `nobody` when we are root."""
    if os.geteuid() == 0:
        return pwd.getpwnam(UNPRIVILEGED)
    return pwd.getpwuid(os.geteuid())


def reachable(path: Path, user: pwd.struct_passwd) -> bool:
    """Whether `user` may pass through every existing folder down to and including `path`."""
    for folder in [path, *path.parents]:
        try:
            info = folder.stat()
        except FileNotFoundError:
            continue
        if info.st_uid == user.pw_uid:
            bit = stat.S_IXUSR
        elif info.st_gid == user.pw_gid:
            bit = stat.S_IXGRP
        else:
            bit = stat.S_IXOTH
        if not info.st_mode & bit:
            return False
    return True


def write_atomically(path: Path, text: str, mode: int = 0o600) -> None:
    """Write a small file so that a reader or a crash sees the old text or the new, never half."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name + ".")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(mode)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _check_owner(folder: Path, *allowed: int) -> None:
    """Refuse a folder that somebody else made, or a link: where paths are long, sockets lie below /tmp."""
    info = folder.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid not in allowed:
        raise PermissionError(f"{folder} belongs to another user or is a link; remove it, or set FANLIGHT_DATA_DIR.")


def _short_folder(wanted: Path, kind: str) -> Path:
    if len(os.fsencode(wanted)) + len("/.s.PGSQL.5432.lock") <= _SOCKET_PATH_LIMIT:
        return wanted
    return Path(tempfile.gettempdir()) / f"fanlight-{os.geteuid()}-{_short_hash(wanted)}-{kind}"


def _short_hash(path: Path) -> str:
    return hashlib.blake2b(os.fsencode(path.absolute()), digest_size=5).hexdigest()
