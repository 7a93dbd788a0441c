//! LoRA adapters are loaded and unloaded, as where
//! `VLLM_ALLOW_RUNTIME_LORA_UPDATING` is set. No recording shows it: all words are
//! inferred.

use std::sync::Arc;

use axum::{
    body::Bytes,
    extract::State,
    response::{IntoResponse, Response},
};
use serde::{Deserialize, de::DeserializeOwned};

use super::request::Fault;
use crate::engine::sim::engine::Engine;

#[derive(Deserialize)]
struct Load {
    #[serde(default)]
    lora_name: String,
    #[serde(default)]
    lora_path: String,
    #[serde(default)]
    load_inplace: bool,
}

#[derive(Deserialize)]
struct Unload {
    #[serde(default)]
    lora_name: String,
}

pub(super) async fn load(State(engine): State<Arc<Engine>>, body: Bytes) -> Response {
    let loaded = read(&body).and_then(|asked: Load| {
        let (name, path) = (&asked.lora_name, &asked.lora_path);
        if name.is_empty() || path.is_empty() {
            return Err(Fault::input(
                400,
                "Both 'lora_name' and 'lora_path' must be provided.".into(),
            ));
        }
        let mut adapters = engine.adapters.lock();
        if !asked.load_inplace && adapters.is_loaded(name) {
            return Err(Fault::input(
                400,
                format!(
                    "The lora adapter '{name}' has already been loaded. If you want to load the \
                     adapter in place, set 'load_inplace' to True."
                ),
            ));
        }
        let loaded = adapters.load_in_place(name, path);
        loaded.map_err(|why| Fault::input(400, why))?;
        Ok(format!(
            "Success: LoRA adapter '{name}' added successfully."
        ))
    });
    answer(loaded)
}

pub(super) async fn unload(State(engine): State<Arc<Engine>>, body: Bytes) -> Response {
    let unloaded = read(&body).and_then(|asked: Unload| {
        let name = &asked.lora_name;
        let gone = engine.adapters.lock().unload(name);
        let missing = |_| Fault::input(404, format!("The lora adapter '{name}' cannot be found."));
        gone.map_err(missing)?;
        Ok(format!(
            "Success: LoRA adapter '{name}' removed successfully."
        ))
    });
    answer(unloaded)
}

fn read<T: DeserializeOwned>(body: &[u8]) -> Result<T, Fault> {
    serde_json::from_slice(body).map_err(|error| Fault::validation("body", &error.to_string()))
}

fn answer(done: Result<String, Fault>) -> Response {
    match done {
        Ok(said) => said.into_response(),
        Err(fault) => fault.reply(),
    }
}
