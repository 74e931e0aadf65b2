#!/usr/bin/env python3
"""Tables that `carat eval` reads, as Arrow's own library writes them.

    V/bin/python scripts/make_table_golden.py crates/carat-fidelity/tests/data     # needs pyarrow

Two record batches; columns of other kinds before and between those that are read, a
missing value, an empty list, text beyond ASCII and 64-, 32- and 8-bit integers.
"""
import sys
from pathlib import Path

import pyarrow as pa


def main():
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    schema = pa.schema([
        ("weight", pa.float32()),
        ("question", pa.string()),
        ("flags", pa.list_(pa.bool_())),
        ("source", pa.struct([("name", pa.string()), ("year", pa.int16())])),
        ("choices", pa.list_(pa.string())),
        ("when", pa.timestamp("s")),
        ("answer", pa.int64()),
        ("code", pa.int8()),
    ])
    rows = [
        dict(weight=0.5, question="What is blue?", flags=[True], source=dict(name="a", year=1999),
             choices=["the sky", "grass"], when=0, answer=0, code=-1),
        dict(weight=None, question="Où est la gare ?", flags=[], source=None,
             choices=["là", "ici", ""], when=None, answer=1, code=None),
        dict(weight=1.0, question="How many?", flags=None, source=dict(name=None, year=None),
             choices=[], when=5, answer=7, code=127),
        dict(weight=2.0, question="Which?", flags=[False, True], source=dict(name="b", year=2),
             choices=["this", "that"], when=6, answer=1, code=-128),
    ]
    for name, indices in [("rows", [0, 1, 2, 3]), ("questions", [0, 3])]:
        with pa.OSFile(str(out / f"{name}.arrow"), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
            for part in (indices[:1], indices[1:]):
                writer.write_batch(pa.RecordBatch.from_pylist([rows[i] for i in part], schema=schema))
    table = pa.table({"question": pa.array(["a", "b"]).dictionary_encode()})
    with pa.OSFile(str(out / "dictionary.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    with pa.OSFile(str(out / "compressed.arrow"), "wb") as sink, \
            pa.ipc.new_stream(sink, schema, options=options) as writer:
        writer.write_batch(pa.RecordBatch.from_pylist(rows * 20, schema=schema))


if __name__ == "__main__":
    main()
