//! The subset of the safetensors format that the trainer needs: it writes files of f32 tensors piece by piece
//! and reads files of f32, bf16 or f16 tensors one by one as f32.
//!
//! It reads with `pread` instead of a memory map: truncation of a mapped file kills the process, and the
//! tensors are copied to f32 anyway.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use half::slice::{HalfBitsSliceExt, HalfFloatSliceExt};
use safetensors::tensor::{Dtype, Metadata, TensorInfo};

use crate::util::input;

#[cfg(target_endian = "big")]
compile_error!("safetensors files are little-endian, and are written from memory as it is");

/// The largest header that Hugging Face's reader accepts, in bytes.
const MAX_HEADER: u64 = 100_000_000;
/// Elements read at a time while converting.
const PIECE: usize = 1 << 20;

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
}

/// The header of a safetensors file that holds f32 tensors (name, shape) one after the other, with the length
/// in bytes of the data that must follow it.
pub fn header<'a>(
    tensors: impl Iterator<Item = (String, &'a [usize])>,
) -> Result<(Vec<u8>, u64), safetensors::SafeTensorError> {
    let mut end = 0;
    let tensors = tensors
        .map(|(name, shape)| {
            let start = end;
            end += shape.iter().product::<usize>() * size_of::<f32>();
            let info = TensorInfo {
                dtype: Dtype::F32,
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
        let malformed = |reason| TensorFileError::Format {
            path: path.to_path_buf(),
            reason,
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
        let data_start = 8 + size;
        let described = data_start + metadata.data_len() as u64;
        if length != described {
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

    /// Reads a tensor of this file as f32 into `out`, which has the same number of elements.
    pub fn read(&self, tensor: &TensorInfo, out: &mut [f32]) -> Result<(), TensorFileError> {
        let width = tensor.dtype.bitsize() / 8;
        let (start, end) = tensor.data_offsets;
        if !readable(tensor.dtype) || end - start != out.len() * width {
            return Err(TensorFileError::Format {
                path: self.path.clone(),
                reason: format!(
                    "a tensor of {} and shape {:?} cannot be read as {} f32",
                    tensor.dtype,
                    tensor.shape,
                    out.len()
                ),
            });
        }
        let failed = |source| TensorFileError::Io {
            path: self.path.clone(),
            source,
        };
        let mut offset = self.data_start + start as u64;
        if tensor.dtype == Dtype::F32 {
            let bytes = bytemuck::cast_slice_mut(out);
            return self.file.read_exact_at(bytes, offset).map_err(failed);
        }
        let mut halves = vec![0_u16; PIECE.min(out.len())];
        for piece in out.chunks_mut(PIECE) {
            let halves = &mut halves[..piece.len()];
            let bytes = bytemuck::cast_slice_mut(halves);
            self.file.read_exact_at(bytes, offset).map_err(failed)?;
            offset += bytes.len() as u64;
            match tensor.dtype {
                Dtype::BF16 => halves
                    .reinterpret_cast::<half::bf16>()
                    .convert_to_f32_slice(piece),
                _ => halves
                    .reinterpret_cast::<half::f16>()
                    .convert_to_f32_slice(piece),
            }
        }
        Ok(())
    }
}

/// Whether tensors of this type can be read as f32.
pub fn readable(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::F32 | Dtype::BF16 | Dtype::F16)
}
