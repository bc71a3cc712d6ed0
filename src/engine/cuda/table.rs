//! Tables of a library's functions, resolved once when the library is loaded.

use std::ffi::{CStr, c_char};

/// Declares a struct of functions by their C names, and `open`, which loads the library and resolves all of
/// them. The types must be those of NVIDIA's headers.
macro_rules! functions {
    ($(#[$meta:meta])* $visibility:vis $table:ident: $($symbol:ident($($argument:ty),*) -> $result:ty;)*) => {
        $(#[$meta])*
        #[allow(non_snake_case)] // the library's own names
        $visibility struct $table {
            $(pub $symbol: unsafe extern "C" fn($($argument),*) -> $result,)*
        }

        impl $table {
            /// Loads the library for a driver of CUDA `driver_major` and resolves the functions; also returns
            /// the library's version. It is never closed: threads that it starts must not lose their code.
            $visibility fn open(
                library: &$crate::engine::cuda::libraries::Library,
                driver_major: Option<usize>,
            ) -> Result<
                ($table, $crate::engine::cuda::libraries::Version),
                $crate::engine::cuda::error::CudaError,
            > {
                let error = |problem| $crate::engine::cuda::error::CudaError::Library {
                    library: library.name,
                    problem,
                };
                let directories = $crate::engine::cuda::libraries::directories();
                let (loaded, version) = library.load(&directories, driver_major).map_err(error)?;
                let loaded = std::mem::ManuallyDrop::new(loaded);
                let table = $table {
                    $($symbol: {
                        // SAFETY: the declared type is the function's own; the library stays loaded.
                        let symbol = unsafe { loaded.get(stringify!($symbol).as_bytes()) };
                        *symbol.map_err(|_| error(library.lacks(stringify!($symbol))))?
                    },)*
                };
                Ok((table, version))
            }
        }
    };
}

pub(super) use functions;

/// A library's text; `None` if it has none.
///
/// # Safety
/// The pointer is null or that of a C string.
pub(super) unsafe fn text(text: *const c_char) -> Option<String> {
    // SAFETY: the caller guarantees the text.
    let text = (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) });
    text.map(|text| text.to_string_lossy().into_owned())
}
