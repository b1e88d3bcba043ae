// Prints the embedding of a sentence, as embed.c does: embed_rs model.coda 101 7592 2088 102
//
//   rustc -O --edition 2021 embed.rs -L native=FOLDER -l dylib=coda_runtime
use std::ffi::{c_char, c_int, c_void, CStr, CString};
use std::ptr;

const MAX_RANK: usize = 8;
const INT64: i32 = 7;

#[repr(C)]
struct CodaError {
    code: c_int,
    message: [c_char; 1012],
}

#[repr(C)]
#[derive(Clone, Copy)]
struct CodaTensor {
    data: *mut c_void,
    bytes: usize,
    dtype: i32,
    rank: i32,
    dims: [i64; MAX_RANK],
}

#[repr(C)]
struct CodaTensorInfo {
    name: *const c_char,
    dtype: i32,
    rank: i32,
    dims: [i64; MAX_RANK],
    dim_text: [*const c_char; MAX_RANK],
}

#[repr(C)]
struct CodaModel {
    _private: [u8; 0],
}

#[repr(C)]
struct CodaSession {
    _private: [u8; 0],
}

extern "C" {
    fn coda_model_open(path: *const c_char, options: *const c_void, model: *mut *mut CodaModel, error: *mut CodaError) -> c_int;
    fn coda_model_free(model: *mut CodaModel);
    fn coda_model_input_count(model: *const CodaModel) -> usize;
    fn coda_model_output_count(model: *const CodaModel) -> usize;
    fn coda_model_input(model: *const CodaModel, index: usize) -> *const CodaTensorInfo;
    fn coda_session_create(model: *mut CodaModel, options: *const c_void, session: *mut *mut CodaSession, error: *mut CodaError) -> c_int;
    fn coda_session_free(session: *mut CodaSession);
    fn coda_session_run(session: *mut CodaSession, inputs: *const CodaTensor, outputs: *mut CodaTensor, error: *mut CodaError) -> c_int;
}

/// A session with its model; both are given back when it is dropped.
struct Session {
    model: *mut CodaModel,
    session: *mut CodaSession,
}

fn check(call: impl FnOnce(*mut CodaError) -> c_int) -> Result<(), String> {
    let mut error = CodaError { code: 0, message: [0; 1012] };
    match call(&mut error) {
        0 => Ok(()),
        _ => Err(unsafe { CStr::from_ptr(error.message.as_ptr()) }.to_string_lossy().into_owned()),
    }
}

impl Session {
    fn open(path: &str) -> Result<Session, String> {
        let path = CString::new(path).map_err(|e| e.to_string())?;
        let mut opened = Session { model: ptr::null_mut(), session: ptr::null_mut() };
        check(|error| unsafe { coda_model_open(path.as_ptr(), ptr::null(), &mut opened.model, error) })?;
        check(|error| unsafe { coda_session_create(opened.model, ptr::null(), &mut opened.session, error) })?;
        Ok(opened)
    }

    fn inputs(&self) -> Vec<String> {
        (0..unsafe { coda_model_input_count(self.model) })
            .map(|i| unsafe { CStr::from_ptr((*coda_model_input(self.model, i)).name) }.to_string_lossy().into_owned())
            .collect()
    }

    /// The first output's shape and numbers.
    fn run(&mut self, inputs: &[CodaTensor]) -> Result<(Vec<i64>, &[f32]), String> {
        let empty = CodaTensor { data: ptr::null_mut(), bytes: 0, dtype: 0, rank: 0, dims: [0; MAX_RANK] };
        let mut outputs = vec![empty; unsafe { coda_model_output_count(self.model) }];
        check(|error| unsafe { coda_session_run(self.session, inputs.as_ptr(), outputs.as_mut_ptr(), error) })?;
        let first = &outputs[0];
        let data = unsafe { std::slice::from_raw_parts(first.data as *const f32, first.bytes / 4) };
        Ok((first.dims[..first.rank as usize].to_vec(), data))
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        unsafe {
            coda_session_free(self.session);
            coda_model_free(self.model);
        }
    }
}

fn run() -> Result<(), String> {
    let words: Vec<String> = std::env::args().collect();
    if words.len() < 3 {
        return Err("usage: embed_rs model.coda TOKEN...".into());
    }
    let mut ids: Vec<i64> = words[2..].iter().map(|w| w.parse().map_err(|e| format!("{w}: {e}"))).collect::<Result<_, _>>()?;
    let (mut ones, mut zeros) = (vec![1i64; ids.len()], vec![0i64; ids.len()]);
    let mut session = Session::open(&words[1])?;
    let mut tensors = Vec::new();
    for name in session.inputs() {
        let data = if name.contains("mask") { &mut ones } else if name.contains("type") { &mut zeros } else { &mut ids };
        let mut dims = [0; MAX_RANK];
        (dims[0], dims[1]) = (1, data.len() as i64);
        tensors.push(CodaTensor { data: data.as_mut_ptr().cast(), bytes: 8 * data.len(), dtype: INT64, rank: 2, dims });
    }
    let (shape, hidden) = session.run(&tensors)?;
    let (tokens, width) = (shape[1] as usize, shape[2] as usize);
    for k in 0..width {
        println!("{:.6}", (0..tokens).map(|i| hidden[i * width + k]).sum::<f32>() / tokens as f32);
    }
    Ok(())
}

fn main() {
    if let Err(message) = run() {
        eprintln!("embed_rs: {message}");
        std::process::exit(1);
    }
}
