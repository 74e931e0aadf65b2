//! How the blocks of each format are read into vectors.
#![allow(non_camel_case_types)] // the formats' own names

use carat_tensor::DType;
use carat_tensor::packed::{Codes, Geometry, geometry};

use super::Vectors;
use super::trits::{FiveTrits, Trits, TwoBits};

/// A format, read by an instruction set.
///
/// # Safety
///
/// As [`Vectors`]; pointers are to a block's codes or fields.
pub(super) trait Form<V: Vectors>: 'static {
    /// The format.
    const DTYPE: DType;
    /// Its arithmetic.
    type Class: Class;
    /// A block's fields, as far as they are shared by its groups.
    type Fields: Copy;

    /// Sizes and constants.
    const GEOMETRY: Geometry = match geometry(Self::DTYPE) {
        Some(geometry) => geometry,
        None => panic!("not a packed format"),
    };
    /// Steps of a unit.
    const UNIT_STEPS: usize = if Self::GEOMETRY.block_columns == 16 {
        4
    } else {
        8
    };
    /// Units of a block.
    const UNITS: usize = Self::GEOMETRY.block_columns / 4 / Self::UNIT_STEPS;
    /// Steps of a group.
    const GROUP_STEPS: usize = Self::GEOMETRY.group_columns / 4;
    /// Bits of a code.
    const BITS: u32 = Self::Class::BITS;
    /// Fails to compile where the class does not fit the format.
    const CHECK_CLASS: () = {
        let bits = match Self::GEOMETRY.codes {
            Codes::Two => 2,
            Codes::Four => 4,
            Codes::Five => 5,
            Codes::Six => 6,
            _ => 8,
        };
        assert!(Self::Class::BITS == bits);
        assert!(Self::Class::STEPS == Self::GROUP_STEPS);
        assert!(Self::Class::OFFSET == Self::GEOMETRY.code_offset);
        assert!(Self::Class::MIN == Self::GEOMETRY.has_min);
    };
    /// Bytes of a block's codes.
    const CODES_BYTES: usize = Self::GEOMETRY.codes_bytes();
    /// Bytes of a block's fields.
    const FIELDS_BYTES: usize = Self::GEOMETRY.fields_bytes();
    /// Bytes of a block.
    const BLOCK_BYTES: usize = Self::GEOMETRY.block_bytes();

    /// As [`Geometry::block_at`], inlined to constants where they are known.
    #[inline(always)]
    fn block_at(block: usize, blocks: usize) -> (usize, usize) {
        let chunk = block - block % Self::GEOMETRY.blocks_per_chunk;
        let rest = blocks - chunk;
        let in_chunk = if rest < Self::GEOMETRY.blocks_per_chunk {
            rest
        } else {
            Self::GEOMETRY.blocks_per_chunk
        };
        let (start, within) = (chunk * Self::BLOCK_BYTES, block - chunk);
        (
            start + within * Self::CODES_BYTES,
            start + in_chunk * Self::CODES_BYTES + within * Self::FIELDS_BYTES,
        )
    }

    unsafe fn fields(at: *const u8) -> Self::Fields;
    /// The codes of a step of a unit.
    unsafe fn step(codes: *const u8, unit: usize, s: usize) -> V::Codes;
    /// The effective scale of a group of the block.
    unsafe fn scale(fields: &Self::Fields, group: usize) -> V::Lanes;
    /// The effective minimum of a group of the block.
    unsafe fn min(fields: &Self::Fields, group: usize) -> V::Lanes;
}

/// What the arithmetic of unpacked codes depends on: formats share it.
pub(super) trait Class: 'static {
    /// Steps of a group.
    const STEPS: usize;
    /// Bits of a code.
    const BITS: u32;
    /// Subtracted from codes.
    const OFFSET: i32;
    /// Whether there is a minimum.
    const MIN: bool;
}

/// The class of these constants.
pub(super) struct Of<const STEPS: usize, const BITS: u32, const OFFSET: i32, const MIN: bool>;

impl<const STEPS: usize, const BITS: u32, const OFFSET: i32, const MIN: bool> Class
    for Of<STEPS, BITS, OFFSET, MIN>
{
    const STEPS: usize = STEPS;
    const BITS: u32 = BITS;
    const OFFSET: i32 = OFFSET;
    const MIN: bool = MIN;
}

/// Step `s` of nibble planes.
#[inline(always)]
pub(super) unsafe fn nibbles<V: Vectors>(at: *const u8, s: usize) -> V::Codes {
    // SAFETY: a unit has 4 vectors of nibbles.
    unsafe {
        let v = V::load(at.wrapping_add(s % 4 * 64));
        V::and(if s < 4 { v } else { V::shift_right(v, 4) }, 15)
    }
}

/// Adds the top bit from bit `s` of a plane to codes of step `s`.
#[inline(always)]
unsafe fn with_top_bit<V: Vectors>(low: V::Codes, plane: *const u8, s: usize) -> V::Codes {
    // SAFETY: a unit has one vector of top bits.
    unsafe {
        let v = V::load(plane);
        let v = if s < 4 {
            V::shift_left(v, 4 - s as i32)
        } else {
            V::shift_right(v, s as i32 - 4)
        };
        V::or_masked(low, v, 0x10)
    }
}

/// Adds two top bits from a pair of planes.
#[inline(always)]
pub(super) unsafe fn with_top_pair<V: Vectors>(
    low: V::Codes,
    planes: *const u8,
    s: usize,
) -> V::Codes {
    // SAFETY: a unit has two vectors of pairs.
    unsafe {
        let v = V::load(planes.wrapping_add(s / 4 * 64));
        let v = match s % 4 {
            0 => V::shift_left(v, 4),
            1 => V::shift_left(v, 2),
            2 => v,
            _ => V::shift_right(v, 2),
        };
        V::or_masked(low, v, 0x30)
    }
}

/// A form of 32 columns with one scale, or with a scale and a minimum.
macro_rules! simple {
    ($name:ident, $class:ty, $step:expr, $load:ident $(, min $at:literal)?) => {
        /// The format of this name.
        pub(super) struct $name;

        impl<V: Vectors> Form<V> for $name {
            const DTYPE: DType = DType::$name;
            type Class = $class;
            type Fields = *const u8;

            #[inline(always)]
            unsafe fn fields(at: *const u8) -> *const u8 {
                at
            }
            #[inline(always)]
            unsafe fn step(codes: *const u8, _unit: usize, s: usize) -> V::Codes {
                // SAFETY: as the trait says.
                unsafe { $step(codes, s) }
            }
            #[inline(always)]
            unsafe fn scale(fields: &*const u8, _group: usize) -> V::Lanes {
                // SAFETY: as the trait says.
                unsafe { V::$load((*fields).cast()) }
            }
            #[inline(always)]
            unsafe fn min(fields: &*const u8, _group: usize) -> V::Lanes {
                let _ = fields;
                // SAFETY: as the trait says.
                unsafe {
                    let min = V::zero();
                    $(let _ = min; let min = V::$load(fields.wrapping_add($at).cast());)?
                    min
                }
            }
        }
    };
}

#[inline(always)]
unsafe fn bytes<V: Vectors>(codes: *const u8, s: usize) -> V::Codes {
    // SAFETY: a block has a vector per step.
    unsafe { V::load(codes.wrapping_add(s * 64)) }
}

#[inline(always)]
unsafe fn five<V: Vectors>(codes: *const u8, s: usize) -> V::Codes {
    // SAFETY: the plane of top bits follows the 4 vectors of nibbles.
    unsafe { with_top_bit::<V>(nibbles::<V>(codes, s), codes.wrapping_add(256), s) }
}

simple!(Q4_0, Of<8, 4, 8, false>, nibbles::<V>, load_f16);
simple!(Q4_1, Of<8, 4, 0, true>, nibbles::<V>, load_f16, min 32);
simple!(Q5_0, Of<8, 5, 16, false>, five::<V>, load_f16);
simple!(Q5_1, Of<8, 5, 0, true>, five::<V>, load_f16, min 32);
simple!(Q8_0, Of<8, 8, 128, false>, bytes::<V>, load_f16);
simple!(I8G16, Of<4, 8, 128, true>, bytes::<V>, load_f32, min 64);
simple!(I8G32, Of<8, 8, 128, true>, bytes::<V>, load_f32, min 64);

/// Ternary formats, for the float path: 256 columns with one scale.
macro_rules! ternary {
    ($name:ident, $vectors:ty) => {
        pub(super) struct $name;

        impl<V: Trits> Form<V> for $name {
            const DTYPE: DType = DType::$name;
            type Class = Of<8, 2, 1, false>;
            type Fields = V::Lanes;

            #[inline(always)]
            unsafe fn fields(at: *const u8) -> V::Lanes {
                // SAFETY: as the trait says.
                unsafe { V::load_f16(at) }
            }
            #[inline(always)]
            unsafe fn step(codes: *const u8, unit: usize, s: usize) -> V::Codes {
                let steps = const { <$vectors as super::trits::Form>::STEPS };
                let step = 8 * unit + s;
                // SAFETY: a block has vectors for all its steps.
                unsafe {
                    let at = codes.wrapping_add(step / steps * 64);
                    V::steps::<$vectors>(at)[step % steps]
                }
            }
            #[inline(always)]
            unsafe fn scale(fields: &V::Lanes, _group: usize) -> V::Lanes {
                *fields
            }
            #[inline(always)]
            unsafe fn min(_fields: &V::Lanes, _group: usize) -> V::Lanes {
                // SAFETY: as the trait says.
                unsafe { V::zero() }
            }
        }
    };
}

ternary!(TQ1_0, FiveTrits);
ternary!(TQ2_0, TwoBits);

/// Scale and minimum of a block, and 6-bit ones of its groups: byte `g % 4` of
/// each lane of vector `g / 4`.
#[derive(Clone, Copy)]
pub(super) struct SubScales<V: Vectors> {
    d: V::Lanes,
    negative_dmin: V::Lanes,
    scales: [V::Codes; 2],
    mins: [V::Codes; 2],
}

impl<V: Vectors> SubScales<V> {
    #[inline(always)]
    unsafe fn load(at: *const u8) -> Self {
        // SAFETY: a block has three vectors of packed bytes, `d` and `dmin`.
        unsafe {
            let (a, b, c) = (
                V::load(at),
                V::load(at.wrapping_add(64)),
                V::load(at.wrapping_add(128)),
            );
            let high = |v| V::shift_right(v, 2);
            let (a_high, b_high) = (high(a), high(b));
            SubScales {
                d: V::load_f16(at.wrapping_add(192)),
                negative_dmin: V::mul(V::load_f16(at.wrapping_add(224)), V::splat(-1.0)),
                scales: [V::and(a, 63), V::or_masked(V::and(c, 15), a_high, 0x30)],
                mins: [
                    V::and(b, 63),
                    V::or_masked(V::and(V::shift_right(c, 4), 15), b_high, 0x30),
                ],
            }
        }
    }
    #[inline(always)]
    unsafe fn scale(&self, group: usize) -> V::Lanes {
        // SAFETY: as the trait says.
        unsafe {
            V::mul(
                self.d,
                V::byte_lanes(self.scales[group / 4], group as i32 % 4),
            )
        }
    }
    #[inline(always)]
    unsafe fn min(&self, group: usize) -> V::Lanes {
        // SAFETY: as the trait says.
        unsafe {
            V::mul(
                self.negative_dmin,
                V::byte_lanes(self.mins[group / 4], group as i32 % 4),
            )
        }
    }
}

macro_rules! k_form {
    ($name:ident, $class:ty, |$codes:ident, $unit:ident, $s:ident| $step:expr) => {
        /// The format of this name.
        pub(super) struct $name;

        impl<V: Vectors> Form<V> for $name {
            const DTYPE: DType = DType::$name;
            type Class = $class;
            type Fields = SubScales<V>;

            #[inline(always)]
            unsafe fn fields(at: *const u8) -> SubScales<V> {
                // SAFETY: as the trait says.
                unsafe { SubScales::load(at) }
            }
            #[inline(always)]
            unsafe fn step($codes: *const u8, $unit: usize, $s: usize) -> V::Codes {
                // SAFETY: 4 vectors of nibbles per unit, then one of top bits.
                unsafe { $step }
            }
            #[inline(always)]
            unsafe fn scale(fields: &SubScales<V>, group: usize) -> V::Lanes {
                // SAFETY: as the trait says.
                unsafe { fields.scale(group) }
            }
            #[inline(always)]
            unsafe fn min(fields: &SubScales<V>, group: usize) -> V::Lanes {
                // SAFETY: as the trait says.
                unsafe { fields.min(group) }
            }
        }
    };
}

k_form!(Q4_K, Of<8, 4, 0, true>, |codes, unit, s| nibbles::<V>(
    codes.wrapping_add(unit * 256),
    s
));
k_form!(Q5_K, Of<8, 5, 0, true>, |codes, unit, s| with_top_bit::<V>(
    nibbles::<V>(codes.wrapping_add(unit * 256), s),
    codes.wrapping_add(2048 + unit * 64),
    s
));

/// Six-bit codes of 256 columns with a signed sub-scale per 16.
pub(super) struct Q6_K;

impl<V: Vectors> Form<V> for Q6_K {
    const DTYPE: DType = DType::Q6_K;
    type Class = Of<4, 6, 32, false>;
    type Fields = (V::Lanes, *const u8);

    #[inline(always)]
    unsafe fn fields(at: *const u8) -> (V::Lanes, *const u8) {
        // SAFETY: 16 sub-scales of 16 rows come before `d`.
        unsafe { (V::load_f16(at.wrapping_add(256)), at) }
    }
    #[inline(always)]
    unsafe fn step(codes: *const u8, unit: usize, s: usize) -> V::Codes {
        // SAFETY: 4 vectors of nibbles per unit, then two of top bits.
        unsafe {
            with_top_pair::<V>(
                nibbles::<V>(codes.wrapping_add(unit * 256), s),
                codes.wrapping_add(2048 + unit * 128),
                s,
            )
        }
    }
    #[inline(always)]
    unsafe fn scale(fields: &(V::Lanes, *const u8), group: usize) -> V::Lanes {
        // SAFETY: as the trait says.
        unsafe { V::mul(fields.0, V::load_i8(fields.1.wrapping_add(group * 16))) }
    }
    #[inline(always)]
    unsafe fn min(_fields: &(V::Lanes, *const u8), _group: usize) -> V::Lanes {
        // SAFETY: as the trait says.
        unsafe { V::zero() }
    }
}
