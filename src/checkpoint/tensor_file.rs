//! The subset of the safetensors format that the trainer needs: it writes files of f32 tensors piece by piece
//! and reads files of f32, bf16 or f16 tensors one by one as f32.
//!
//! It reads with `pread` instead of a memory map: truncation of a mapped file kills the process, and the
//! tensors are copied to f32 anyway. Headers are untrusted: the names, shapes and reasons that a message repeats are
//! limited here.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use half::slice::{HalfBitsSliceExt, HalfFloatSliceExt};
use rayon::prelude::*;
use safetensors::tensor::{Dtype, Metadata, TensorInfo};

use crate::util::format::shortened;
use crate::util::input;

#[cfg(target_endian = "big")]
compile_error!("safetensors files are little-endian, and are written from memory as it is");

/// The largest header that Hugging Face's reader accepts, in bytes.
const MAX_HEADER: u64 = 100_000_000;
/// Longest name of a tensor in bytes, and most dimensions; those of published models have under 100 and 5.
const LONGEST_NAME: usize = 500;
const MOST_DIMENSIONS: usize = 16;
/// Elements that a thread reads and converts at a time.
const PIECE: usize = 1 << 18;

/// Why a file of tensors cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum TensorFileError {
    /// A file operation failed.
    #[error("cannot read {}: {source}", path.display())]
    Io { path: PathBuf, source: io::Error },
    /// The file is not a complete safetensors file.
    #[error(
        "{} is not a complete safetensors file: {reason}; download or copy it again",
        path.display()
    )]
    Format {
        path: PathBuf,
        /// The first fault, with the sizes.
        reason: String,
    },
    /// A tensor has values that no training can start from.
    #[error(
        "{}: {count} of the {of} values of `{tensor}` are NaN or infinite; download or copy it again, or name other \
         weights",
        path.display()
    )]
    NotFinite {
        path: PathBuf,
        tensor: String,
        /// Number of values that are not finite, and of all.
        count: usize,
        of: usize,
    },
}

/// The header of a safetensors file that holds tensors (name, shape) of one type, one after the other, with the length in
/// bytes of the data that must follow it.
pub fn header<'a>(
    tensors: impl Iterator<Item = (String, &'a [usize])>,
    dtype: Dtype,
) -> Result<(Vec<u8>, u64), safetensors::SafeTensorError> {
    let mut end = 0;
    let tensors = tensors
        .map(|(name, shape)| {
            let start = end;
            end += shape.iter().product::<usize>() * dtype.bitsize() / 8;
            let info = TensorInfo {
                dtype,
                shape: shape.to_vec(),
                data_offsets: (start, end),
            };
            (name, info)
        })
        .collect();
    // transformers refuses files without the framework of their layout.
    let format = HashMap::from([("format".to_string(), "pt".to_string())]);
    let mut json = serde_json::to_vec(&Metadata::new(Some(format), tensors)?)?;
    // The data starts at a multiple of 8 bytes, so that a memory map is aligned.
    json.resize(json.len().next_multiple_of(8), b' ');
    let mut header = (json.len() as u64).to_le_bytes().to_vec();
    header.append(&mut json);
    Ok((header, end as u64))
}

/// A safetensors file with a parsed header.
#[derive(Debug)]
pub struct TensorFile {
    path: PathBuf,
    file: File,
    metadata: Metadata,
    data_start: u64,
}

impl TensorFile {
    /// Reads the header and checks that the file contains all data that it describes.
    pub fn open(path: &Path) -> Result<Self, TensorFileError> {
        let failed = |source| TensorFileError::Io {
            path: path.to_path_buf(),
            source,
        };
        let malformed = |reason: String| TensorFileError::Format {
            path: path.to_path_buf(),
            reason: shortened(&reason),
        };
        let file = input::open(path).map_err(failed)?;
        let length = file.metadata().map_err(failed)?.len();
        let mut size = [0; 8];
        if length < size.len() as u64 {
            return Err(malformed(format!("it has {length} bytes")));
        }
        file.read_exact_at(&mut size, 0).map_err(failed)?;
        let size = u64::from_le_bytes(size);
        if size > MAX_HEADER || size > length - 8 {
            return Err(malformed(format!(
                "it has {length} bytes and says that its header has {size}"
            )));
        }
        let mut json = vec![0; size as usize];
        file.read_exact_at(&mut json, 8).map_err(failed)?;
        let metadata: Metadata = serde_json::from_slice(&json)
            .map_err(|error| malformed(format!("its header cannot be parsed: {error}")))?;
        let odd = |(name, info): &(String, &TensorInfo)| {
            name.len() > LONGEST_NAME
                || name.contains(char::is_control)
                || info.shape.len() > MOST_DIMENSIONS
        };
        if let Some((name, info)) = metadata.tensors().into_iter().find(odd) {
            return Err(malformed(format!(
                "its header has a tensor of {} dimensions with a name of {} bytes, `{}`",
                info.shape.len(),
                name.len(),
                name.escape_debug()
            )));
        }
        let data_start = 8 + size;
        let described = u128::from(data_start) + metadata.data_len() as u128;
        if u128::from(length) != described {
            return Err(malformed(format!(
                "it has {length} bytes, its header describes {described}"
            )));
        }
        Ok(Self {
            path: path.to_path_buf(),
            file,
            metadata,
            data_start,
        })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The names of the tensors, in the order of the file.
    pub fn names(&self) -> Vec<String> {
        self.metadata.offset_keys()
    }

    /// A tensor's data type, shape and position.
    pub fn info(&self, name: &str) -> Option<&TensorInfo> {
        self.metadata.info(name)
    }

    /// Reads a tensor of this file as f32 into `out`, which has the same number of elements, on rayon's current pool. A
    /// value that is NaN or infinite is an error.
    pub fn read(&self, name: &str, out: &mut [f32]) -> Result<(), TensorFileError> {
        let info = self.info(name);
        let fits = |info: &&TensorInfo| {
            readable(info.dtype) && info.shape.iter().product::<usize>() == out.len()
        };
        let Some(info) = info.filter(fits) else {
            return Err(TensorFileError::Format {
                path: self.path.clone(),
                reason: format!("`{name}` cannot be read as {} f32 from {info:?}", out.len()),
            });
        };
        let start = self.data_start + info.data_offsets.0 as u64;
        let of = out.len();
        let read = |buffer: &mut Vec<u16>, (number, piece): (usize, &mut [f32])| {
            let offset = start + (number * PIECE * info.dtype.bitsize() / 8) as u64;
            self.read_piece(info.dtype, offset, piece, buffer)
        };
        let count = (out.par_chunks_mut(PIECE).enumerate())
            .map_init(Vec::new, read)
            .try_reduce(|| 0, |one, other| Ok(one + other))
            .map_err(|source| TensorFileError::Io {
                path: self.path.clone(),
                source,
            })?;
        if count > 0 {
            return Err(TensorFileError::NotFinite {
                path: self.path.clone(),
                tensor: name.to_owned(),
                count,
                of,
            });
        }
        Ok(())
    }

    /// Reads elements of a type from a position in the file, as f32. Returns how many are not finite.
    fn read_piece(
        &self,
        dtype: Dtype,
        offset: u64,
        piece: &mut [f32],
        buffer: &mut Vec<u16>,
    ) -> io::Result<usize> {
        if dtype == Dtype::F32 {
            self.file
                .read_exact_at(bytemuck::cast_slice_mut(piece), offset)?;
        } else {
            buffer.resize(piece.len(), 0);
            self.file
                .read_exact_at(bytemuck::cast_slice_mut(buffer), offset)?;
            if dtype == Dtype::BF16 {
                (buffer.reinterpret_cast::<half::bf16>()).convert_to_f32_slice(piece);
            } else {
                (buffer.reinterpret_cast::<half::f16>()).convert_to_f32_slice(piece);
            }
        }
        Ok(piece.iter().filter(|value| !value.is_finite()).count())
    }
}

/// Whether tensors of this type can be read as f32.
pub fn readable(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::F32 | Dtype::BF16 | Dtype::F16)
}
