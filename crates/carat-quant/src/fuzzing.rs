//! Bodies of the fuzz targets, replayed over a corpus by the ordinary tests. None may
//! panic, whatever the bytes.

use carat_bundle::spec::ModelSpec;
use carat_tensor::{GridMatrix, grid::Grid};

use crate::{Recipe, Treatment, matrix};

/// A model with two layers, of 64 columns and of sizes that few groups divide.
fn model() -> ModelSpec {
    let norm = serde_json::json!({ "eps": 1e-6, "weight_offset": 0.0 });
    let layer = serde_json::json!({
        "mixer_norm": norm, "post_mixer_norm": null, "ffn_norm": norm, "post_ffn_norm": null,
        "residual_scale": 1.0,
        "mixer": { "kind": "attention", "heads": 4, "kv_heads": 2, "head_dim": 16,
            "qkv_bias": true, "out_bias": false, "qk_norm": null, "rope": null,
            "window": null, "scale": 0.25, "logit_softcap": null },
        "ffn": { "kind": "gated", "intermediate_size": 96, "activation": "silu", "bias": false },
    });
    serde_json::from_value(serde_json::json!({
        "hidden_size": 64, "vocab_size": 40, "max_context": 64,
        "embedding": { "scale": 1.0 }, "layers": [layer, layer], "final_norm": norm,
        "head": { "tied": true, "scale": 1.0, "softcap": null }, "ropes": [],
    }))
    .expect("invariant: the model above is one")
}

/// Reads the bytes as a recipe and resolves it for a small model; what is to be
/// quantized must have a size, and a matrix of its shape must be quantized.
pub fn recipe(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else {
        return;
    };
    let Ok(recipe) = Recipe::parse("fuzz", text) else {
        return;
    };
    let Ok(plan) = recipe.resolve(&model()) else {
        return;
    };
    let mut done = std::collections::HashSet::new();
    for planned in &plan.tensors {
        let Treatment::Quantize(method) = planned.treatment else {
            continue;
        };
        let [rows, columns] = *planned.decl.shape.dims() else {
            panic!("{}: a vector is to be quantized", planned.decl.name);
        };
        if !done.insert((method, rows, columns)) {
            continue;
        }
        let parts = method.grid().parts(rows, columns);
        let parts = parts.expect("invariant: a resolved shape fits its grid");
        let bytes: Vec<u8> = (0..rows * columns)
            .flat_map(|i| ((i * 37 % 101) as f32 / 64.0 - 0.75).to_le_bytes())
            .collect();
        let source = matrix::Source {
            dtype: carat_tensor::DType::F32,
            rows,
            columns,
            data: &bytes,
        };
        match matrix::quantize(&method, source, None) {
            Ok(made) => {
                let stored = made.to_bytes().expect("invariant: its parts have a size");
                assert_eq!(stored.len(), parts.total());
            }
            // Said at conversion, since recipes are checked without a model.
            Err(matrix::MatrixError::TensorSearch { .. }) => {}
            Err(e) => panic!("{}: {e}", planned.decl.name),
        }
    }
}

/// Reads the bytes as a stored matrix: a line with grid, rows and columns, then its
/// sections. One that is accepted must be written as it was, but for unused bits.
pub fn grid(data: &[u8]) {
    let end = data.iter().take(96).position(|b| *b == b'\n');
    let Some((head, bytes)) = end.map(|end| (&data[..end], &data[end + 1..])) else {
        return;
    };
    let words: Vec<&str> = std::str::from_utf8(head).unwrap_or("").split(' ').collect();
    let [name, rows, columns] = words[..] else {
        return;
    };
    let (Ok(grid), Ok(rows), Ok(columns)) = (
        Grid::from_name(name),
        rows.parse::<usize>(),
        columns.parse::<usize>(),
    ) else {
        return;
    };
    let Ok(matrix) = GridMatrix::from_bytes(grid, rows, columns, bytes) else {
        return;
    };
    let mut values = vec![0.0; columns];
    // Rows may be many where columns are none.
    for row in 0..rows.min(bytes.len()) {
        matrix.decode_row(row, &mut values);
    }
    let written = matrix.to_bytes().expect("invariant: its parts have a size");
    let again = GridMatrix::from_bytes(grid, rows, columns, &written);
    let again = again.expect("invariant: what was written is read");
    assert_eq!(again.codes, matrix.codes);
    assert_eq!(again.zero_points, matrix.zero_points);
}
