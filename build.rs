//! Compiles `proto/` without protoc and writes the descriptor set that
//! reflection serves.

use std::{env, error::Error, fs, path::PathBuf};

use prost::Message;

fn main() -> Result<(), Box<dyn Error>> {
    let files = [
        "berth/v1/sampling.proto",
        "berth/v1/replica.proto",
        "berth/v1/fleet.proto",
    ];
    println!("cargo:rerun-if-changed=proto");

    let descriptors = protox::compile(files, ["proto"])?;
    let out = PathBuf::from(env::var("OUT_DIR")?);
    fs::write(
        out.join("berth_descriptor.bin"),
        descriptors.encode_to_vec(),
    )?;

    tonic_prost_build::configure()
        // Prompts and packed results are large: `Bytes` shares the buffer that
        // the message was decoded from.
        .bytes(".")
        .compile_fds(descriptors)?;
    Ok(())
}
