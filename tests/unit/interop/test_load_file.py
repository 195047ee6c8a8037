"""Every layout of expert counts, its traps, and what is refused."""

import json
import os
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from moesaic.errors import ConfigError
from moesaic.interop.load_file import read_dump
from moesaic.interop.torch_file import torch_bytes
from moesaic.spec.codec import to_plain

COUNTS = np.array([[0, 0, 0, 0], [3, 1, 2, 2], [4, 0, 1, 3]], dtype=np.int32)


@pytest.fixture
def put(tmp_path):
    def write(name, data):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(data, bytes):
            path.write_bytes(data)
        else:
            path.write_text(data if isinstance(data, str) else json.dumps(data))
        return str(path)

    return write


def sparse(dump):
    return dump.counts_LE[list(dump.sparse_rows)].tolist()


WANTED = COUNTS[1:].tolist()


# --- SGLang -------------------------------------------------------------------------------------------------


def test_stat_drops_steps_that_the_ring_buffer_never_filled(put):
    steps = np.stack([COUNTS, COUNTS * 0, COUNTS, COUNTS * 0, COUNTS * 0])
    dump = read_dump(
        put("expert_distribution_recorder_1.pt", torch_bytes({"rank": 0, "logical_count": steps}))
    )
    assert (dump.layout, dump.num_steps, dump.num_zero_steps) == ("SGLang stat", 2, 3)
    assert sparse(dump) == (2 * COUNTS[1:]).tolist()
    assert dump.sparse_layers == (1, 2)
    assert [row.tolist() for row in dump.load().counts] == sparse(dump)


@pytest.mark.parametrize("steps", [COUNTS, [COUNTS.tolist(), (COUNTS * 0).tolist(), COUNTS.tolist()]])
def test_logical_count_with_and_without_steps(put, steps):
    value = steps.tolist() if isinstance(steps, np.ndarray) else steps
    dump = read_dump(put("a.json", {"logical_count": value}))
    assert dump.counts_LE[1:].tolist() == ((1 if len(steps[0]) == 4 else 2) * COUNTS[1:]).tolist()
    assert dump.num_zero_steps == (0 if len(steps[0]) == 4 else 1)


SLOTS = np.array([[0, 1, 2, 3, 0, 1]] * 3)


def per_pass(rank, counts, passes=(1,)):
    records = [
        {"forward_pass_id": one, "rank": rank, "gatherer_key": "primary", "global_physical_count": counts}
        for one in passes
    ]
    return torch_bytes({"records": records, "last_physical_to_logical_map": SLOTS})


def physical(seed):
    found = np.random.default_rng(seed).integers(0, 9, (3, 6))
    found[0] = 0
    return found


def test_per_pass_ranks_add_up_by_logical_expert(put, tmp_path):
    for rank in (0, 1):
        put(f"run/expert_distribution_recorder_5_{rank}.pt", per_pass(rank, physical(rank), passes=(1, 2)))
    dump = read_dump(str(tmp_path / "run"))
    total = 2 * (physical(0) + physical(1))
    assert dump.ranks == (0, 1)
    assert dump.num_steps == 2
    assert dump.counts_LE.tolist() == (total[:, :4] + np.pad(total[:, 4:], ((0, 0), (0, 2)))).tolist()


def test_ranks_that_recorded_the_same_tokens_count_once(put, tmp_path):
    for rank in range(4):
        put(f"run/r_5_{rank}.pt", per_pass(rank, physical(0)))
    dump = read_dump(str(tmp_path / "run"))
    assert dump.counts_LE.sum() == physical(0).sum()
    assert "all 4 ranks recorded the same tokens" in dump.notes[-1]


def per_token(ids, rank=0, **more):
    record = {
        "forward_pass_id": 1,
        "rank": rank,
        "input_ids": [1, 2],
        "positions": [0, 1],
        "extend_seq_lens": [2],
        "forward_mode": 1,
        "topk_ids_of_layer": ids,
    }
    return torch_bytes({"records": [record], "last_physical_to_logical_map": SLOTS, **more})


def test_per_token_padding_is_no_choice_and_slots_become_experts(put):
    ids = np.full((3, 5, 8), -1)
    ids[1:, :4, 0], ids[1:, :4, 1] = 4, 3  # slot 4 is a copy of expert 0; the fifth token is padding
    dump = read_dump(put("a.pt", per_token(ids)))
    assert dump.layout == "SGLang per_token"
    assert sparse(dump) == [[4, 0, 0, 4]] * 2
    assert (dump.top_k, dump.columns, dump.num_padded, dump.num_tokens) == (2, 8, 2, 4)


def test_recorder_files_that_do_not_hold_together(put, tmp_path):
    for data, words in (
        ({"records": []}, "at least one"),
        ({"something": 1}, "neither logical_count nor records"),
        ({"records": [{"a": 1}]}, "neither global_physical_count nor topk_ids_of_layer"),
        ({"logical_count": "text"}, "must be a tensor of numbers, got a str"),
        ({"records": [{"global_physical_count": COUNTS}]}, "last_physical_to_logical_map is missing"),
        (
            {
                "records": [{"rank": "x", "global_physical_count": SLOTS}],
                "last_physical_to_logical_map": SLOTS,
            },
            "rank must be a whole number",
        ),
        (
            {"records": [{"global_physical_count": COUNTS}], "last_physical_to_logical_map": SLOTS},
            r"shape \[3, 4\], the map of slots has \[3, 6\]",
        ),
    ):
        with pytest.raises(ConfigError, match=words):
            read_dump(put("a.pt", torch_bytes(data)))
    put("mixed/a_1_0.pt", per_pass(0, physical(0)))
    put("mixed/b_2_0.pt", per_pass(0, physical(1)))
    with pytest.raises(ConfigError, match="2 recordings beside each other"):
        read_dump(str(tmp_path / "mixed"))


# --- TensorRT-LLM -------------------------------------------------------------------------------------------


def statistics(tmp_path, num_experts=4, ranks=(0, 1), experts_in_meta=4):
    folder = tmp_path / "stats"
    folder.mkdir()
    (folder / "meta_info.json").write_text(
        json.dumps({"num_experts": experts_in_meta, "num_experts_per_token": 2})
    )
    for rank in ranks:
        tensors = {
            f"{i}_{layer}": COUNTS[layer].astype(np.int64) * (i > 0) for i in range(3) for layer in (1, 2)
        }
        save_file(
            {name: value[:num_experts] for name, value in tensors.items()}, folder / f"rank{rank}.safetensors"
        )
        save_file({"0_1": np.arange(7)}, folder / f"rank{rank}_raw.safetensors")
    return str(folder)


def test_statistics_add_up_over_ranks_and_iterations(tmp_path):
    dump = read_dump(statistics(tmp_path))
    assert dump.sparse_layers == (1, 2)
    assert sparse(dump) == (4 * COUNTS[1:]).tolist()
    assert (dump.num_steps, dump.num_zero_steps, dump.ranks, dump.top_k) == (2, 1, (0, 1), 2)
    assert dump.short_ranks == ()


def test_a_rank_that_lacks_an_iteration_is_short(tmp_path):
    folder = statistics(tmp_path)
    save_file({"0_1": COUNTS[1].astype(np.int64)}, Path(folder) / "rank1.safetensors")
    assert read_dump(folder).short_ranks == (1,)


def test_statistics_that_contradict_their_meta(tmp_path):
    with pytest.raises(ConfigError, match=r"0_1 is I64 \[4\]; meta_info.json says 8 experts"):
        read_dump(statistics(tmp_path, experts_in_meta=8))


# --- ours, CSV, routes --------------------------------------------------------------------------------------


def record(counts, phase="decode"):
    return {
        "counts": counts,
        "phase": phase,
        "num_tokens": 4,
        "num_steps": 1,
        "since_s": 0.0,
        "until_s": 1.0,
        "plan_version": 0,
        "source": "engine",
    }


def test_our_record_and_lists(put):
    dump = read_dump(put("a.json", record(WANTED)))
    assert sparse(dump) == WANTED
    assert to_plain(dump.load())["counts"] == WANTED
    assert sparse(read_dump(put("b.json", WANTED))) == WANTED


@pytest.fixture
def server():
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            ok = self.path == "/v1/internal/experts"
            loads = [record(WANTED, "prefill"), record(WANTED, "decode")]
            body = json.dumps({"window_s": None, "layer_idxs": [1, 2], "loads": loads, "skew": []}).encode()
            self.send_response(200 if ok else 404)
            self.end_headers()
            self.wfile.write(body if ok else b"{}")

        def log_message(self, *arguments):
            pass

    made = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=made.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{made.server_port}"
    made.shutdown()
    thread.join()
    made.server_close()


def test_a_server_is_read_with_both_phases_and_layer_names(server):
    for address in (server, f"{server}/v1/internal/experts"):
        dump = read_dump(address)
        assert dump.sparse_layers == (1, 2)
        assert sparse(dump) == (2 * COUNTS[1:]).tolist()
        assert dump.notes == ("prefill and decode together",)
    with pytest.raises(ConfigError, match=r"no answer: .*Not Found"):
        read_dump(f"{server}/v1/other")
    with pytest.raises(ConfigError, match=r"no answer: .*is the server up"):
        read_dump("http://127.0.0.1:9")


def test_csv_long_and_wide(put):
    rows = [f"{layer},{expert},{COUNTS[layer, expert]}" for layer in range(3) for expert in range(4)]
    long = read_dump(put("a.csv", "\n".join(["layer,expert,count", *rows, "2,3,10"])))
    assert long.counts_LE[2].tolist() == [4, 0, 1, 13]
    assert long.sparse_layers == (1, 2)
    assert long.notes == ("1 of 13 rows name a layer and expert again: added up",)
    wide = read_dump(put("b.csv", "\n".join(",".join(map(str, row)) for row in COUNTS.tolist())))
    assert sparse(wide) == WANTED


def test_a_csv_without_line_breaks_is_refused_before_memory_is(tmp_path):
    endless = tmp_path / "a.csv"
    endless.touch()
    os.truncate(endless, 2**36)  # a hole: no bytes on the disk
    with pytest.raises(ConfigError, match=r"a line is longer than 1048576 characters"):
        read_dump(str(endless))


def test_routes(tmp_path):
    routes = np.array([[[0, 1], [0, 2], [3, 0]]])
    np.savez(tmp_path / "a.npz", experts=routes.astype(np.uint8))
    dump = read_dump(str(tmp_path / "a.npz"))
    assert dump.counts_LE.tolist() == [[3, 1, 1, 1]]
    assert (dump.top_k, dump.num_tokens) == (2, 3)
    np.savez(tmp_path / "b.npz", experts=np.array([{}], dtype=object))
    with pytest.raises(ConfigError, match=r"not a numpy .npz of plain arrays"):
        read_dump(str(tmp_path / "b.npz"))


# --- bad input ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("a.json", {"logical_count": [[1, -2]]}, "expert 1 of row 0 has the count -2"),
        ("a.json", '{"logical_count": [[1, NaN]]}', "the count nan"),
        ("a.json", {"logical_count": [[[1, 2]], [[-1, 2]]]}, "expert 0 of row 0 has the count -1"),
        ("a.json", {"logical_count": [[1, 2], [1]]}, "row 1 has 1 entries, row 0 has 2"),
        ("a.json", {"logical_count": [[[1, 2]], [[1]]]}, "step 1 has 1 experts, step 0 has 2"),
        ("a.json", {"logical_count": [[[1], [2]], [[1]]]}, "step 1 has 1 rows, step 0 has 2"),
        ("a.json", {"logical_count": [[[1]], 2]}, "step 1 must be a list of rows, got a int"),
        (
            "a.json",
            {"logical_count": [[[1], [1]], [[1], [1, 2]]]},
            "step 1 row 1 has 2 entries, row 0 has 1",
        ),
        ("a.json", {"logical_count": [[1, "x"]]}, 'row 0 must hold numbers, entry 1 is "x"'),
        ("a.json", {"logical_count": [["1", "2"]]}, 'row 0 must hold numbers, entry 0 is "1"'),
        ("a.json", {"logical_count": [[True, False]]}, "row 0 must hold numbers, entry 0 is true"),
        ("a.json", {"logical_count": [[1, None]]}, "row 0 must hold numbers, entry 1 is null"),
        ("a.json", {"logical_count": [[1, 2], 3]}, "row 1 must be a list of counts, got a int"),
        (
            "a.json",
            {"logical_count": [[1, 1e308]]},
            r"expert 1 of row 0 has the count 1e\+308; .* 0 to 2\^53",
        ),
        ("a.json", {"logical_count": [[[9e15, 1]], [[9e15, 1]]]}, r"the count 1.8e\+16"),
        ("a.json", {"logical_count": [[1, 10**400]]}, r"counts are from 0 to 2\^53"),
        ("a.csv", "layer,expert,count\n7,0,1e17", "expert 0 of layer 7 has the count"),
        ("a.csv", "1,2\n3", "row 1 has 1 entries, row 0 has 2"),
        ("a.json", {"logical_count": "x"}, "must be"),
        ("a.json", {"logical_count": []}, "must be"),
        ("a.json", {"physical_to_logical_map": [[0]]}, "a placement, not a load"),
        ("a.json", {"other": 1}, "its keys are other"),
        ("a.json", "[1", "not valid JSON"),
        ("a.json", "[" * 100_000, "nested too deep"),
        ("a.json", "7", "got a int"),
        ("a.json", {"loads": []}, "counted nothing yet"),
        ("a.csv", "", "empty"),
        ("a.csv", "layer,count\n1,2", "expert lacks"),
        ("a.csv", "layer,expert,count\n1,2", "line 2 has 2 cells, the header 3"),
        ("a.csv", "layer,expert,count\n1,0.5,2", "both are ids from 0"),
        ("a.csv", "layer,expert,count\n1,0,nan", "line 2 has the count nan"),
        ("a.csv", "1,2\n3,x", "line 2 is not numbers"),
        ("a.csv", "1;2\n3;4", "separated by commas; this file has ';'"),
        ("a.csv", "layer\texpert\tcount\n", r"separated by commas; this file has '\\t'"),
        ("a.pt", b"", "a.pt: empty; record or copy it again"),
        ("a.pkl", "x", "a pickle can run code"),
        ("a.txt", "x", "this one in '.txt'"),
        ("a.safetensors", "x", "give the folder, with its meta_info.json"),
        ("a.npz", "x", "not a numpy .npz"),
    ],
)
def test_bad_input_is_one_error_that_names_it(put, name, data, words):
    with pytest.raises(ConfigError, match=words) as caught:
        read_dump(put(name, data))
    assert "\n" not in str(caught.value)
    assert name in str(caught.value)


def test_an_all_zero_dump_reads_and_is_no_load(put):
    dump = read_dump(put("a.json", {"logical_count": [[0, 0], [0, 0]]}))
    with pytest.raises(ConfigError, match=r"all 4 counts are 0; record while requests are served"):
        dump.load()


def test_files_too_large_to_hold_are_refused_before_they_are_read(tmp_path):
    path = tmp_path / "a.json"
    with open(path, "wb") as stream:
        stream.truncate(10 * 10**9)  # a hole: takes no room
    with pytest.raises(ConfigError, match=r"10.0 GB of JSON; it is read whole, up to 268 MB"):
        read_dump(str(path))


def test_a_large_recording_is_summed_step_by_step(put):
    """Storages are mapped: the sum touches one step at a time."""
    steps = np.ones((2000, 3, 64), dtype=np.int32)
    dump = read_dump(put("a.pt", torch_bytes({"logical_count": steps})))
    assert dump.num_steps == 2000
    assert (dump.counts_LE == 2000).all()


def test_missing_names(tmp_path):
    with pytest.raises(ConfigError, match="no such file, folder or address"):
        read_dump(str(tmp_path / "absent.json"))
    with pytest.raises(ConfigError, match=r"neither meta_info.json"):
        read_dump(str(tmp_path))


def test_ids_that_would_take_all_memory_are_refused(put, tmp_path):
    huge = np.where(SLOTS == 1, 2**40, SLOTS)
    data = {"records": [{"global_physical_count": SLOTS}], "last_physical_to_logical_map": huge}
    with pytest.raises(ConfigError, match="names expert 1099511627776 in 6 slots"):
        read_dump(put("a.pt", torch_bytes(data)))
    record = {"rank": 0, "topk_ids_of_layer": np.full((1, 2, 8), 2**40)}
    with pytest.raises(ConfigError, match="ids below 100000 are read"):
        read_dump(put("a.pt", torch_bytes({"records": [record]})))
    rows = [f"{layer},999999,1" for layer in range(50)]
    with pytest.raises(ConfigError, match="no model has as many"):
        read_dump(put("a.csv", "\n".join(["layer,expert,count", *rows])))
    np.savez(tmp_path / "a.npz", experts=np.array([[[2**40]]]))
    with pytest.raises(ConfigError, match="ids below 100000 are read"):
        read_dump(str(tmp_path / "a.npz"))


def test_routes_that_unpack_to_more_than_memory_are_refused(tmp_path, monkeypatch):
    path = tmp_path / "a.npz"
    np.savez_compressed(path, experts=np.zeros((1, 1000, 8), np.uint8))
    assert path.stat().st_size < 1000
    monkeypatch.setattr("moesaic.interop.load_file.MAX_ROUTES_BYTES", 7999)
    with pytest.raises(ConfigError, match=r"kB of routes; up to"):
        read_dump(str(path))
