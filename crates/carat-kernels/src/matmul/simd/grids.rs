//! Products with grids: codes of any width are first spread to a byte each in the
//! scratch, then mapped to integers or values by in-register look-ups, so that no loop
//! knows a grid by name. What passes through the L1 cache costs less than reading
//! the codes from memory.

use std::ops::Range;

use carat_tensor::grid::{Code, Grid, Scale, Spread};
use carat_tensor::packed::grids::{
    Places, UNIT, e4m3, half_values, integer_codes, integer_factor, shared_scale, table_of_row,
};
use carat_tensor::packed::{PANEL_ROWS, PackedRef};

use super::floats::AHEAD;
use super::forms::{Class, Of, nibbles, with_top_pair};
use super::integers::tiled;
use super::scratch::{BLOCK_FLOATS, with_scratch};
use super::{MAX_TILE, Unpacked, Vectors, unroll8};
use crate::matmul::job::{Job, Kernel, Paths};
use crate::matmul::prepared::Need;
use crate::matmul::scalar;

/// The kernel for a grid.
pub(super) fn kernel<V: Vectors>(grid: Grid, float: bool) -> Kernel {
    match grid.spread {
        // Look-ups have a table for four rows at the least.
        Spread::Rows(n) if n % 4 != 0 => scalar::kernel(Need::Floats),
        _ => Kernel {
            isa: V::ISA,
            paths: Paths::Tiled,
            panels: if float { 1 } else { V::PANELS },
            run: if float {
                run_floats::<V>
            } else {
                run_integers::<V>
            },
        },
    }
}

/// Scales and zero points of a panel.
#[derive(Clone, Copy)]
pub(super) struct Fields {
    /// How scales are stored; none if there is only the shared one.
    kind: Option<Scale>,
    scales: *const u8,
    /// Null if there are none.
    zero_points: *const u8,
    /// Columns that share them.
    run: usize,
    /// Multiplied with each scale, or the only one.
    shared: f32,
    zero_point: f32,
    /// Whether there are zero points, or the only one.
    has_zero_point: bool,
    factor: f32,
}

impl Fields {
    fn of(weight: PackedRef<'_>, places: &Places, panel: usize, factor: f32) -> Fields {
        let (shared, zero_point) = shared_scale(places, weight.tail());
        let bytes = weight.panel(panel);
        Fields {
            kind: (places.scales > 0).then_some(places.grid.scale),
            scales: bytes[places.scales_at..].as_ptr(),
            zero_points: match places.grid.zero_points && places.scales > 0 {
                true => bytes[places.zero_points_at..].as_ptr(),
                false => std::ptr::null(),
            },
            run: places.run(),
            shared,
            zero_point: f32::from(zero_point),
            has_zero_point: places.grid.zero_points,
            factor,
        }
    }

    /// Scale and zero point of 16 rows.
    ///
    /// # Safety
    ///
    /// V must be present and the panel have that many groups.
    #[inline(always)]
    unsafe fn at<V: Vectors>(&self, group: usize) -> (V::Lanes, V::Lanes) {
        let plain = |bytes: *const u8, value: fn(u8) -> f32| {
            // SAFETY: the caller's promise: 16 scales of a byte.
            let bytes = unsafe { bytes.cast::<[u8; PANEL_ROWS]>().read() };
            bytes.map(value)
        };
        // SAFETY: the caller's promise.
        unsafe {
            let scales = |width: usize| self.scales.wrapping_add(group * PANEL_ROWS * width);
            let scale = match self.kind {
                None => V::splat(1.0),
                Some(Scale::F32) => V::load_f32(scales(4).cast()),
                Some(Scale::F16) => V::load_f16(scales(2)),
                Some(Scale::E8M0) => V::load_f32(plain(scales(1), e8m0).as_ptr()),
                Some(Scale::E4M3) => V::load_f32(plain(scales(1), e4m3).as_ptr()),
            };
            let scale = V::mul(scale, V::splat(self.shared));
            let zero_point = if self.zero_points.is_null() {
                V::splat(self.zero_point)
            } else {
                V::load_i8(self.zero_points.wrapping_add(group * PANEL_ROWS))
            };
            (V::mul(scale, V::splat(self.factor)), zero_point)
        }
    }
}

/// `2^(e - 127)`, without a branch; 255 is no number.
#[inline(always)]
fn e8m0(e: u8) -> f32 {
    let bits = (u32::from(e) << 23).max(0x0040_0000);
    f32::from_bits(if e == 255 { 0x7fc0_0000 } else { bits })
}

/// Walks groups of columns and says where the scale changes.
struct Groups {
    group: usize,
    end: usize,
    run: usize,
}

impl Groups {
    fn from(column: usize, run: usize) -> Groups {
        let group = column / run;
        Groups {
            group,
            end: run.saturating_mul(group),
            run,
        }
    }

    /// The group of `column`, where it is the first of it seen.
    #[inline(always)]
    fn first(&mut self, column: usize) -> Option<usize> {
        (column >= self.end).then(|| {
            let group = self.group;
            self.group += 1;
            self.end = self.run.saturating_mul(group + 1);
            group
        })
    }
}

/// How codes become integers or values.
#[derive(Clone, Copy)]
pub(super) enum Values {
    /// A table of 16.
    Table,
    /// So many tables of 16.
    Tables(usize),
    /// Signed bytes, plus 128.
    Bytes,
    E4M3,
    E5M2,
}

impl Values {
    fn of(code: Code) -> Values {
        match code {
            Code::Int(8) => Values::Bytes,
            Code::Fp8E4M3 => Values::E4M3,
            Code::Fp8E5M2 => Values::E5M2,
            Code::Lut(bits) if bits > 4 => Values::Tables((1 << bits) / 16),
            _ => Values::Table,
        }
    }
}

fn run_integers<V: Vectors>(job: &Job<'_>) {
    let g = job.weight.layout().geometry();
    match (g.group_columns, g.has_min) {
        (16, _) => run_class::<V, Of<4, 8, 128, true>>(job),
        (_, true) => run_class::<V, Of<8, 8, 128, true>>(job),
        (_, false) => run_class::<V, Of<8, 8, 128, false>>(job),
    }
}

fn run_class<V: Vectors, C: Class>(job: &Job<'_>) {
    let layout = job.weight.layout();
    let places = layout.grid().expect("invariant: chosen for a grid");
    let code = places.grid.code;
    // For each of the four times four rows.
    let table = [integer_codes(code); 4];
    let table = match code {
        Code::Int(8) => std::ptr::null(),
        _ => table.as_flattened().as_ptr(),
    };
    let factor = integer_factor(places.grid);
    tiled::<V>(
        job,
        4 * C::STEPS,
        |panel, columns, out| {
            let fields = Fields::of(job.weight, places, panel, factor);
            let first = columns.start / UNIT;
            let at = job.weight.panel(panel)[first * places.unit_bytes()..].as_ptr();
            let units = columns.end.div_ceil(UNIT) - first;
            let groups = columns.len().div_ceil(4 * C::STEPS);
            // SAFETY: V is present: this kernel was chosen for a machine that has it.
            // The panel has these units and fields, the scratch room for as many
            // columns as `tiled` passes.
            unsafe {
                V::expand(code.bits(), at, units, table, out.codes, V::PANELS * 64);
                V::fields(&fields, columns.start, groups, 4 * C::STEPS, out);
            }
        },
        |weights, columns, tokens, x, sums, first| {
            // SAFETY: V is present; what `tiled` passes is what tiles take.
            unsafe {
                if tokens <= 2 {
                    V::small_tile::<C>(weights, columns, tokens, x, sums, first);
                } else {
                    V::tile::<C>(weights, columns, tokens, x, sums, first);
                }
            }
        },
    );
}

/// Low and high bytes of fp16 values: by table of 16, half, row of four, entry.
pub(super) type Tables = [[[[u8; 16]; 4]; 2]; 16];

/// Fills the tables of a panel's values; `ids` is whose they are already.
fn fill_tables(
    weight: PackedRef<'_>,
    places: &Places,
    panel: usize,
    tables: &mut Tables,
    ids: &mut [usize; 4],
) {
    let Code::Lut(bits) = places.grid.code else {
        if ids[0] == usize::MAX {
            let values = half_values(places.grid.code).map(u16::to_le_bytes);
            for half in 0..2 {
                tables[0][half] = [values.map(|v| v[half]); 4];
            }
            ids[0] = 0;
        }
        return;
    };
    for (rows, id) in ids.iter_mut().enumerate() {
        let table = table_of_row(places, panel * PANEL_ROWS + 4 * rows);
        if *id == table {
            continue;
        }
        *id = table;
        let bytes = &weight.tail()[table * (2 << bits)..][..2 << bits];
        for (part, tables) in bytes.chunks(32).zip(&mut *tables) {
            for (i, value) in part.as_chunks::<2>().0.iter().enumerate() {
                tables[0][rows][i] = value[0];
                tables[1][rows][i] = value[1];
            }
        }
    }
}

fn run_floats<V: Vectors>(job: &Job<'_>) {
    let layout = job.weight.layout();
    let places = layout.grid().expect("invariant: chosen for a grid");
    let (columns, code) = (layout.columns(), places.grid.code);
    let values = Values::of(code);
    let tokens = job.tokens.len();
    let tiles = tokens.div_ceil(V::FLOAT_TOKENS);
    let mut tables: Tables = [[[[0; 16]; 4]; 2]; 16];
    let mut ids = [usize::MAX; 4];
    with_scratch(|scratch| {
        assert!(tokens * 64 <= scratch.sums.len());
        for panel in job.panels.clone() {
            fill_tables(job.weight, places, panel, &mut tables, &mut ids);
            let fields = Fields::of(job.weight, places, panel, 1.0);
            for column in (0..columns).step_by(BLOCK_FLOATS) {
                let count = BLOCK_FLOATS.min(columns - column);
                let units = count.div_ceil(UNIT);
                let first = column / UNIT * places.unit_bytes();
                let at = job.weight.panel(panel)[first..].as_ptr();
                let (codes, floats) = (scratch.codes.as_mut_ptr(), scratch.floats.as_mut_ptr());
                // SAFETY: V is present: this kernel was chosen for a machine that
                // has it. The panel has these units and fields, the scratch room
                // for BLOCK_FLOATS columns of either.
                unsafe {
                    V::expand(code.bits(), at, units, std::ptr::null(), codes, 64);
                    V::values(
                        values,
                        &tables,
                        &fields,
                        column..column + count,
                        codes,
                        floats,
                    );
                }
                for tile in 0..tiles {
                    let from = tokens * tile / tiles;
                    let tile_tokens = tokens * (tile + 1) / tiles - from;
                    let mut x = [std::ptr::null(); MAX_TILE];
                    for (t, x) in x[..tile_tokens].iter_mut().enumerate() {
                        let values = job.x.floats(job.tokens.start + from + t);
                        *x = values[column..][..count].as_ptr();
                    }
                    let sums = scratch.sums[from * 64..].as_mut_ptr();
                    // SAFETY: as above; `sums` has room for the tile's tokens
                    // (asserted), each of `x` `count` values.
                    unsafe { V::quad_tile(floats, count / 4, tile_tokens, &x, sums, column == 0) };
                }
                // The last columns, if they are no four.
                let rest = count - count % 4;
                for (token, sums) in job.tokens.clone().zip(scratch.sums.as_chunks_mut::<64>().0) {
                    for (t, x) in job.x.floats(token)[column..][..count][rest..]
                        .iter()
                        .enumerate()
                    {
                        let weights = scratch.floats[rest * 16..].as_chunks::<4>().0;
                        for (sums, w) in sums.as_chunks_mut::<4>().0.iter_mut().zip(weights) {
                            sums[t] = w[t].mul_add(*x, sums[t]);
                        }
                    }
                }
            }
            for (token, sums) in job.tokens.clone().zip(scratch.sums.as_chunks::<64>().0) {
                let mut out = [0.0; PANEL_ROWS];
                for ([a, b, c, d], row) in sums.as_chunks::<4>().0.iter().zip(V::QUAD_ROWS) {
                    out[row] = (a + b) + (c + d);
                }
                job.store(token, panel, &out);
            }
        }
    });
}

/// Spreads the codes of units to a vector for each step, `stride` bytes apart, and
/// maps them by a table of 16 (of each four rows) unless it is null.
///
/// # Safety
///
/// V must be present; there must be that many units, and room for them.
#[inline(always)]
pub(super) unsafe fn expand<V: Vectors>(
    bits: usize,
    from: *const u8,
    units: usize,
    table: *const u8,
    to: *mut u8,
    stride: usize,
) {
    // SAFETY: the caller's promise.
    unsafe {
        match (bits, table.is_null()) {
            (1, _) => expand_bits::<V, 1, false>(from, units, table, to, stride),
            (2, true) => expand_bits::<V, 2, false>(from, units, table, to, stride),
            (2, false) => expand_bits::<V, 2, true>(from, units, table, to, stride),
            (3, _) => expand_bits::<V, 3, false>(from, units, table, to, stride),
            (4, true) => expand_bits::<V, 4, false>(from, units, table, to, stride),
            (4, false) => expand_bits::<V, 4, true>(from, units, table, to, stride),
            (6, _) => expand_bits::<V, 6, false>(from, units, table, to, stride),
            _ => expand_bits::<V, 8, false>(from, units, table, to, stride),
        }
    }
}

#[inline(always)]
unsafe fn expand_bits<V: Vectors, const BITS: usize, const MAP: bool>(
    from: *const u8,
    units: usize,
    table: *const u8,
    to: *mut u8,
    stride: usize,
) {
    let (mut from, mut to) = (from, to);
    for _ in 0..units {
        // SAFETY: as in `expand`; prefetching is harmless anywhere.
        unsafe {
            for line in 0..BITS {
                V::prefetch(from.wrapping_add(AHEAD + line * 64));
            }
            unroll8!(s => {
                let codes = step::<V, BITS>(from, s);
                V::store(to, if MAP { V::lookup(table, codes) } else { codes });
                to = to.wrapping_add(stride);
            });
        }
        from = from.wrapping_add(BITS * 64);
    }
}

/// The codes of a step of a unit.
#[inline(always)]
unsafe fn step<V: Vectors, const BITS: usize>(unit: *const u8, s: usize) -> V::Codes {
    // SAFETY: a unit has BITS vectors.
    unsafe {
        let pairs = || {
            let v = V::load(unit.wrapping_add(s / 4 * 64));
            V::and(V::shift_right(v, 2 * (s as i32 % 4)), 3)
        };
        match BITS {
            1 => V::and(V::shift_right(V::load(unit), s as i32), 1),
            2 => pairs(),
            3 => {
                let v = V::load(unit.wrapping_add(128));
                let v = if s < 2 {
                    V::shift_left(v, 2 - s as i32)
                } else {
                    V::shift_right(v, s as i32 - 2)
                };
                V::or_masked(pairs(), v, 4)
            }
            4 => nibbles::<V>(unit, s),
            6 => with_top_pair::<V>(nibbles::<V>(unit, s), unit.wrapping_add(256), s),
            _ => V::load(unit.wrapping_add(s * 64)),
        }
    }
}

/// Effective scales and minima of groups, into every PANELS-th vector of `out`.
///
/// # Safety
///
/// V must be present; the panel must have these groups, and `out` room for them.
#[inline(always)]
pub(super) unsafe fn fields<V: Vectors>(
    fields: &Fields,
    column: usize,
    groups: usize,
    group_columns: usize,
    out: Unpacked,
) {
    let mut walk = Groups::from(column, fields.run);
    // SAFETY: the caller's promise.
    unsafe {
        let (mut scale, mut min) = (V::zero(), V::zero());
        for i in 0..groups {
            if let Some(group) = walk.first(column + i * group_columns) {
                let zero_point;
                (scale, zero_point) = fields.at::<V>(group);
                if fields.has_zero_point {
                    min = V::mul(V::mul(scale, zero_point), V::splat(-1.0));
                }
            }
            V::store_f32(out.scales.wrapping_add(i * V::PANELS * 16), scale);
            V::store_f32(out.mins.wrapping_add(i * V::PANELS * 16), min);
        }
    }
}

/// Values of spread codes: `[step][row][4]`, rows in the order of `V::QUAD_ROWS`; whole
/// sixteens of columns.
///
/// # Safety
///
/// V must be present; there must be as many codes, their fields, and room.
#[inline(always)]
pub(super) unsafe fn values<V: Vectors>(
    values: Values,
    tables: &Tables,
    fields: &Fields,
    columns: Range<usize>,
    codes: *const u8,
    out: *mut f32,
) {
    const TABLE: u8 = 0;
    const TABLES: u8 = 1;
    const BYTES: u8 = 2;
    const E4M3: u8 = 3;
    const E5M2: u8 = 4;
    /// As `values`; KIND is one of the above.
    #[inline(always)]
    unsafe fn of<V: Vectors, const KIND: u8>(
        count: usize,
        tables: &Tables,
        fields: &Fields,
        columns: Range<usize>,
        codes: *const u8,
        out: *mut f32,
    ) {
        let mut walk = Groups::from(columns.start, fields.run);
        let (mut codes, mut out) = (codes, out);
        // SAFETY: the caller's promise.
        unsafe {
            // fp16 of `1024 + byte`, and of E4M3 a 256th: made exact by `unit` and
            // `bias`, with one rounding at the end, that of the scale.
            let unit = V::splat(if KIND == E4M3 { 256.0 } else { 1.0 });
            let (mut scale, mut bias) = ([V::zero(); 4], [V::zero(); 4]);
            for column in columns.step_by(16) {
                if let Some(group) = walk.first(column) {
                    let (scales, zero_points) = fields.at::<V>(group);
                    scale = quads::<V>(scales);
                    let offset = if KIND == BYTES { 1024.0 + 128.0 } else { 0.0 };
                    // Negated, so that adding a zero keeps the sign of zeros.
                    let bias_of = V::add(zero_points, V::splat(offset));
                    bias = quads::<V>(V::mul(bias_of, V::splat(-1.0)));
                }
                for _ in 0..4 {
                    let c = V::load(codes);
                    codes = codes.wrapping_add(64);
                    let none = V::and(c, 0);
                    let (low, high) = match KIND {
                        TABLE => (
                            V::lookup(tables[0][0].as_ptr().cast(), c),
                            V::lookup(tables[0][1].as_ptr().cast(), c),
                        ),
                        TABLES => {
                            let (mut low, mut high) = (none, none);
                            for (j, [lows, highs]) in tables[..count].iter().enumerate() {
                                let c = V::xor(c, 16 * j as u8);
                                low = V::or_masked(low, V::lookup(lows.as_ptr().cast(), c), 255);
                                high = V::or_masked(high, V::lookup(highs.as_ptr().cast(), c), 255);
                            }
                            (low, high)
                        }
                        BYTES => (c, V::xor(none, 0x64)),
                        // s0eeeemm m0000000
                        E4M3 => (
                            V::and(V::shift_left(c, 7), 0x80),
                            V::or_masked(V::and(c, 0x80), V::shift_right(c, 1), 0x3f),
                        ),
                        _ => (none, c),
                    };
                    let halves = V::halves(low, high);
                    for j in 0..4 {
                        let value = V::mul(scale[j], V::fma(halves[j], unit, bias[j]));
                        V::store_f32(out, value);
                        out = out.wrapping_add(16);
                    }
                }
            }
        }
    }
    // SAFETY: the caller's promise.
    unsafe {
        match values {
            Values::Table => of::<V, TABLE>(1, tables, fields, columns, codes, out),
            Values::Tables(n) => of::<V, TABLES>(n, tables, fields, columns, codes, out),
            Values::Bytes => of::<V, BYTES>(0, tables, fields, columns, codes, out),
            Values::E4M3 => of::<V, E4M3>(0, tables, fields, columns, codes, out),
            Values::E5M2 => of::<V, E5M2>(0, tables, fields, columns, codes, out),
        }
    }
}

/// A value for each row as four for each, in the order of `V::QUAD_ROWS`.
#[inline(always)]
unsafe fn quads<V: Vectors>(lanes: V::Lanes) -> [V::Lanes; 4] {
    let (mut rows, mut out) = ([0.0; PANEL_ROWS], [[0.0; 4]; PANEL_ROWS]);
    // SAFETY: V is present; 16 and 64 floats.
    unsafe {
        V::store_f32(rows.as_mut_ptr(), lanes);
        for (out, row) in out.iter_mut().zip(V::QUAD_ROWS) {
            *out = [rows[row]; 4];
        }
        let at = out.as_ptr().cast::<f32>();
        [
            V::load_f32(at),
            V::load_f32(at.wrapping_add(16)),
            V::load_f32(at.wrapping_add(32)),
            V::load_f32(at.wrapping_add(48)),
        ]
    }
}

/// Values of a panel, `[step][row][4]`, for T tokens: adds steps of four columns to
/// `sums`, `[token][row][4]`, or starts them if `first`.
///
/// # Safety
///
/// V must be present; there must be that many steps in `weights` and in the first T
/// of `x`, and `T` tokens in `sums`.
#[inline(always)]
pub(super) unsafe fn quad_tile<V: Vectors, const T: usize>(
    weights: *const f32,
    steps: usize,
    x: &[*const f32; MAX_TILE],
    sums: *mut f32,
    first: bool,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let mut acc = [[V::zero(); 4]; T];
        if !first {
            for t in 0..T {
                for j in 0..4 {
                    acc[t][j] = V::load_f32(sums.wrapping_add((t * 4 + j) * 16));
                }
            }
        }
        for i in 0..steps {
            for j in 0..4 {
                let w = V::load_f32(weights.wrapping_add((i * 4 + j) * 16));
                for t in 0..T {
                    acc[t][j] = V::fma(w, V::splat4(x[t].wrapping_add(4 * i)), acc[t][j]);
                }
            }
        }
        for t in 0..T {
            for j in 0..4 {
                V::store_f32(sums.wrapping_add((t * 4 + j) * 16), acc[t][j]);
            }
        }
    }
}
