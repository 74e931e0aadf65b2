use crate::DType;
use crate::grid::{Code, Grid, Spread};

/// How a matrix is stored: in a block format, or as a grid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Form {
    /// A format of blocks, or plain floats.
    Block(DType),
    /// A grid.
    Grid(Grid),
}

impl Form {
    /// Whether its products with int8 activations are sums of integers: palettes and
    /// floats of eight bits and more take float activations.
    pub const fn is_integer(self) -> bool {
        match self {
            Form::Block(dtype) => !dtype.is_float(),
            Form::Grid(grid) => matches!(grid.code, Code::Int(_) | Code::Trit | Code::Fp4),
        }
    }

    /// Whether its products with int8 activations are sums of integers over a whole row:
    /// trits of which a row or the tensor has one scale.
    pub const fn is_row_of_trits(self) -> bool {
        match self {
            Form::Block(_) => false,
            Form::Grid(grid) => {
                matches!(grid.code, Code::Trit)
                    && matches!(grid.spread, Spread::Channel | Spread::Tensor)
            }
        }
    }
}

impl From<DType> for Form {
    fn from(dtype: DType) -> Form {
        Form::Block(dtype)
    }
}

impl From<Grid> for Form {
    fn from(grid: Grid) -> Form {
        Form::Grid(grid)
    }
}

impl std::fmt::Display for Form {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Form::Block(dtype) => dtype.fmt(f),
            Form::Grid(grid) => grid.fmt(f),
        }
    }
}
