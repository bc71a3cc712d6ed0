//! Tables of a library's functions, resolved once when the library is loaded.

/// Declares a struct of functions by their C names, and `load`, which resolves all of them or returns the
/// name of the first that is missing. The types must be those of NVIDIA's headers.
macro_rules! functions {
    ($(#[$meta:meta])* $visibility:vis $table:ident: $($symbol:ident($($argument:ty),*) -> $result:ty;)*) => {
        $(#[$meta])*
        #[allow(non_snake_case)] // the library's own names
        $visibility struct $table {
            $(pub $symbol: unsafe extern "C" fn($($argument),*) -> $result,)*
        }

        impl $table {
            /// Resolves the functions; an error is the name of the first that is missing.
            ///
            /// # Safety
            /// The library stays loaded as long as the table is used.
            unsafe fn load(library: &libloading::Library) -> Result<$table, &'static str> {
                Ok($table {
                    $($symbol: {
                        // SAFETY: the declared type is the function's own; the caller keeps the library.
                        let symbol = unsafe { library.get(stringify!($symbol).as_bytes()) };
                        *symbol.map_err(|_| stringify!($symbol))?
                    },)*
                })
            }
        }
    };
}

pub(super) use functions;
