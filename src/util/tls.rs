//! What all TLS connections of this process share.

use webpki_root_certs::TLS_SERVER_ROOT_CERTS;

/// Chooses ring for the cryptography of rustls.
pub fn use_ring() {
    // A second installation is refused and harmless.
    let _ = rustls::crypto::ring::default_provider().install_default();
}

/// Mozilla's root certificates in DER where the system has none, as in an image made from scratch; else `None`.
pub fn roots_in_place_of_systems() -> Option<impl Iterator<Item = &'static [u8]>> {
    let system = rustls_native_certs::load_native_certs().certs;
    let roots = || TLS_SERVER_ROOT_CERTS.iter().map(|root| root.as_ref());
    system.is_empty().then(roots)
}
