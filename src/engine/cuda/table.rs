//! Tables of a library's functions, resolved once when the library is loaded.

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
            /// Loads the library for a driver of CUDA `driver_major` and resolves the functions. It is never
            /// closed: threads that it starts must not lose their code.
            $visibility fn open(
                library: &$crate::engine::cuda::libraries::Library,
                driver_major: Option<usize>,
            ) -> Result<$table, $crate::engine::cuda::error::CudaError> {
                let error = |problem| $crate::engine::cuda::error::CudaError::Library {
                    library: library.name,
                    problem,
                };
                let directories = $crate::engine::cuda::libraries::directories();
                let loaded = library.load(&directories, driver_major).map_err(error)?;
                let loaded = std::mem::ManuallyDrop::new(loaded);
                Ok($table {
                    $($symbol: {
                        // SAFETY: the declared type is the function's own; the library stays loaded.
                        let symbol = unsafe { loaded.get(stringify!($symbol).as_bytes()) };
                        *symbol.map_err(|_| error(library.lacks(stringify!($symbol))))?
                    },)*
                })
            }
        }
    };
}

pub(super) use functions;
