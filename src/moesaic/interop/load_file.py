"""One reader for every kind of expert load: a file, a folder or the address of a server of ours."""

from __future__ import annotations

import csv
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO
from urllib.error import URLError
from urllib.parse import urlsplit, urlunsplit
from urllib.request import Request, urlopen

import numpy as np

from moesaic.errors import ConfigError
from moesaic.interop.dump import MAX_JSON_BYTES, Dump, checked, merged, parse_json, read_json, sum_steps
from moesaic.interop.sglang_dump import MAX_EXPERTS, read_sglang_pt
from moesaic.interop.trtllm_dump import META, read_trtllm
from moesaic.spec.codec import from_plain
from moesaic.spec.experts import ExpertLoad
from moesaic.units import format_bytes

SERVER_PATH = "/v1/internal/experts"
TIMEOUT_S = 10.0
MAX_CSV_LAYERS = 10_000  # guess: fifty times the deepest model
MAX_CSV_LINE = 2**20  # characters; guess: a thousand experts of a thousand digits
MAX_CSV_CELLS = 2**22  # guess: different layers x experts that a file may name
MAX_ROUTES_BYTES = 4 * 10**9  # guess: routes are held in memory, and their pairs counted
_RANK_FILE = re.compile(r"(.+)_(\d+)\.pt")


def read_dump(name: str) -> Dump:
    """The counts at a path or an http address.

    Raises: ConfigError naming the file, what is wrong with it, and what would be read.
    """
    if name.startswith(("http://", "https://")):
        return _from_server(name)
    path = Path(name).expanduser()
    if path.is_dir():
        return _from_folder(path)
    if not path.is_file():
        raise ConfigError(
            f"no such file, folder or address: {name[:200]!r}; give a dump (.pt, .json, .csv, .npz), a "
            "folder of a "
            "recorder, or http://HOST:PORT of a moesaic server"
        )
    suffix = path.suffix.lower()
    if suffix == ".json":
        return _from_json(read_json(path), str(path))
    if suffix == ".csv":
        return _from_csv(path)
    if suffix == ".npz":
        return _from_npz(path)
    if suffix == ".safetensors":
        raise ConfigError(f"{path}: one rank's statistics; give the folder, with its {META}")
    if suffix in (".pt", ".pth", ".bin"):
        return read_sglang_pt(path)
    if suffix in (".pkl", ".pickle"):
        raise ConfigError(
            f"{path}: a pickle can run code when it is opened, so it was not; give JSON, CSV or a .pt"
        )
    raise ConfigError(
        f"{path}: files of a load end in .pt, .json, .csv or .npz, this one in {suffix or 'nothing'!r}"
    )


def _from_folder(path: Path) -> Dump:
    if (path / META).is_file():
        return read_trtllm(path)
    files = sorted(path.glob("*.pt"))
    if not files:
        raise ConfigError(
            f"{path}: neither {META} (TensorRT-LLM) nor .pt files (SGLang); give one file of the folder"
        )
    runs = {match[1] for match in (_RANK_FILE.fullmatch(file.name) for file in files) if match}
    if len(runs) > 1:
        raise ConfigError(
            f"{path}: {len(runs)} recordings beside each other ({', '.join(sorted(runs)[:3])}); give each "
            "a folder, "
            "or they would be taken for ranks of one"
        )
    return merged([read_sglang_pt(file) for file in files], str(path))


def _from_server(address: str) -> Dump:
    parts = urlsplit(address)
    path = parts.path if parts.path.strip("/") else SERVER_PATH
    url = urlunsplit(parts._replace(path=path))
    try:
        with urlopen(Request(url, headers={"accept": "application/json"}), timeout=TIMEOUT_S) as answer:
            text = answer.read(MAX_JSON_BYTES + 1)
    except (URLError, OSError, ValueError) as error:
        raise ConfigError(
            f"{url}: no answer: {getattr(error, 'reason', error)}; is the server up?"
        ) from error
    if len(text) > MAX_JSON_BYTES:
        raise ConfigError(f"{url}: more than {format_bytes(MAX_JSON_BYTES)} of answer; it is no expert load")
    return _from_json(parse_json(text, url), url)


def _from_json(data: Any, name: str) -> Dump:
    if isinstance(data, list):
        return sum_steps(name, "JSON counts", data)
    if not isinstance(data, dict):
        raise ConfigError(f"{name}: a load is a JSON object or a list of rows, got a {type(data).__name__}")
    if "logical_count" in data:
        return sum_steps(name, "SGLang logical_count", data["logical_count"])
    if "loads" in data:
        return _server_loads(data, name)
    if "counts" in data:
        load = from_plain(ExpertLoad, data, where=name)
        return _of_record(load, "moesaic load", name, None)
    if "physical_to_logical_map" in data or "slot_expert" in data or "instances" in data:
        raise ConfigError(f"{name}: a placement, not a load; give it as --current")
    keys = ", ".join(sorted(data)[:5]) or "none"
    raise ConfigError(
        f"{name}: no expert load: it needs counts, loads or logical_count, and its keys are {keys}"
    )


def _server_loads(data: dict[str, Any], name: str) -> Dump:
    if not isinstance(data["loads"], list) or not data["loads"]:
        raise ConfigError(f"{name}: the server has counted nothing yet; send it requests first")
    loads = [
        from_plain(ExpertLoad, one, where=name, path=f"loads[{i}]") for i, one in enumerate(data["loads"])
    ]
    idxs = data.get("layer_idxs")
    names = tuple(idxs) if isinstance(idxs, list) and all(isinstance(i, int) for i in idxs) else None
    dumps = [_of_record(load, "moesaic server", name, names) for load in loads]
    found = merged(dumps, name)
    if len(loads) > 1:
        phases = " and ".join(load.phase for load in loads)
        found = Dump(
            **{field: getattr(found, field) for field in Dump.__slots__} | {"notes": (f"{phases} together",)}
        )
    return found


def _of_record(load: ExpertLoad, layout: str, name: str, layers: tuple[int, ...] | None) -> Dump:
    if len({len(row) for row in load.counts}) != 1:
        raise ConfigError(
            f"{name}: counts must have as many experts in every layer, got {[len(r) for r in load.counts]}"
        )
    counts = np.stack([np.asarray(row, dtype=np.float64) for row in load.counts])
    if layers is not None and len(layers) != len(counts):
        raise ConfigError(f"{name}: layer_idxs names {len(layers)} layers, counts has {len(counts)}")
    return checked(
        Dump(
            source=name,
            layout=layout,
            counts_LE=counts,
            num_steps=load.num_steps,
            phase=load.phase,
            num_tokens=load.num_tokens,
            layer_idxs=layers,
        )
    )


def _from_csv(path: Path) -> Dump:
    """Rows `layer,expert,count` under a header that says so, or a table of a layer a row."""
    try:
        with open(path, newline="", encoding="utf-8-sig") as stream:
            lines = _short_lines(path, stream)
            rows = ((number, row) for number, row in enumerate(csv.reader(lines), 1) if row)
            first = next(rows, None)
            if first is None:
                raise ConfigError(f"{path}: empty")
            other = next((mark for mark in ";\t|" if len(first[1]) == 1 and mark in first[1][0]), None)
            if other is not None:
                raise ConfigError(f"{path}: columns are separated by commas; this file has {other!r}")
            header = [cell.strip().lower() for cell in first[1]]
            if "count" in header:
                return _long_csv(path, header, rows)
            table = [_numbers(path, *first)]
            for number, row in rows:
                table.append(_numbers(path, number, row))
                if len(table) > MAX_CSV_LAYERS:
                    raise ConfigError(f"{path}: over {MAX_CSV_LAYERS} rows; a table has a layer a row")
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path}: cannot be read as CSV: {error}") from error
    return sum_steps(str(path), "CSV", table)


def _short_lines(path: Path, stream: TextIO) -> Iterator[str]:
    """The lines of a file, none of which is read whole if it is no row of counts.

    Raises: ConfigError for a longer line.
    """
    while line := stream.readline(MAX_CSV_LINE):
        if len(line) == MAX_CSV_LINE and not line.endswith("\n"):
            raise ConfigError(
                f"{path}: a line is longer than {MAX_CSV_LINE} characters; a row is a layer, or a count"
            )
        yield line


def _long_csv(path: Path, header: list[str], rows: Iterator[tuple[int, list[str]]]) -> Dump:
    missing = {"layer", "expert"} - set(header)
    if missing:
        raise ConfigError(
            f"{path}: the columns layer, expert and count are needed; {', '.join(sorted(missing))} lacks"
        )
    at = [header.index(name) for name in ("layer", "expert", "count")]
    totals: dict[tuple[int, int], float] = {}
    num_rows = 0
    for number, row in rows:
        num_rows += 1
        if len(row) != len(header):
            raise ConfigError(f"{path}: line {number} has {len(row)} cells, the header {len(header)}")
        layer, expert, count = _numbers(path, number, [row[i] for i in at])
        if (
            layer != int(layer)
            or expert != int(expert)
            or min(layer, expert) < 0
            or max(layer, expert) > 10**6
        ):
            raise ConfigError(
                f"{path}: line {number} has layer {layer:g} and expert {expert:g}; both are ids from 0"
            )
        if not np.isfinite(count) or count < 0:
            raise ConfigError(
                f"{path}: line {number} has the count {count:g}; counts are finite and at least 0"
            )
        key = int(layer), int(expert)
        totals[key] = totals.get(key, 0.0) + count
        if len(totals) > MAX_CSV_CELLS:
            raise ConfigError(f"{path}: names over {MAX_CSV_CELLS} different experts by line {number}")
    if not totals:
        raise ConfigError(f"{path}: a header and no rows")
    idxs = sorted({layer for layer, _ in totals})
    num_experts = 1 + max(expert for _, expert in totals)
    if len(idxs) * num_experts > MAX_CSV_CELLS:
        raise ConfigError(f"{path}: {len(idxs)} layers of up to {num_experts} experts: no model has as many")
    counts = np.zeros((len(idxs), num_experts))
    place = {layer: row for row, layer in enumerate(idxs)}
    for (layer, expert), count in totals.items():
        counts[place[layer], expert] = count
    again = num_rows - len(totals)
    notes = (f"{again} of {num_rows} rows name a layer and expert again: added up",) if again else ()
    return checked(Dump(
        source=str(path), layout="CSV", counts_LE=counts, num_steps=1, layer_idxs=tuple(idxs), notes=notes
    ))  # fmt: skip


def _numbers(path: Path, number: int, cells: list[str]) -> list[float]:
    try:
        return [float(cell) for cell in cells]
    except ValueError as error:
        raise ConfigError(
            f"{path}: line {number} is not numbers: {error}; a table has a layer a row, or a header "
            "layer,expert,count"
        ) from error


def _from_npz(path: Path) -> Dump:
    """Routes: `experts` [layers, tokens, k], as a recorder of routes writes them; pairs come with them."""
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(info.file_size for info in archive.infolist() if info.filename == "experts.npy")
        if size > MAX_ROUTES_BYTES:  # unpacked, as it would be held
            raise ConfigError(
                f"{path}: {format_bytes(size)} of routes; up to {format_bytes(MAX_ROUTES_BYTES)} are held in "
                "memory"
            )
        with np.load(path, allow_pickle=False) as data:
            if "experts" not in data.files:
                raise ConfigError(
                    f"{path}: no array experts [layers, tokens, k]; it has {', '.join(data.files)}"
                )
            raw = data["experts"]
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path}: not a numpy .npz of plain arrays: {error}") from error
    if raw.ndim != 3 or raw.dtype.kind not in "iu" or 0 in raw.shape:
        raise ConfigError(
            f"{path}: experts must be whole numbers by layer, token and choice, got {list(raw.shape)}"
        )
    if int(raw.max()) >= MAX_EXPERTS:
        raise ConfigError(f"{path}: experts names {int(raw.max())}; ids below {MAX_EXPERTS} are read")
    routes = raw.astype(np.int64)
    counts = np.stack([np.bincount(row[row >= 0], minlength=1 + int(routes.max())) for row in routes])
    return checked(
        Dump(
            source=str(path),
            layout="routes",
            counts_LE=counts.astype(np.float64),
            num_steps=1,
            routes_LTK=routes,
            top_k=int((routes >= 0).sum(axis=2).max()),
            columns=routes.shape[2],
            num_tokens=routes.shape[1],
        )
    )
